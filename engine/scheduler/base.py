"""What every scheduling policy shares: the queue, the batch, and the blocks that go with them.

There is no prefill phase and no decode phase. Each request has tokens, of which the first
num_computed_tokens have their KV in the cache; a step computes some of the rest. A new prompt has
many tokens to compute, a decoding request has one, a preempted request has its prompt and its
output to compute again, and all of them are the same thing.

    add ──▶ waiting ──schedule──▶ running ──remove──▶ (ended)
               ▲                     │
               └──────preempt────────┘   gives up all blocks; its tokens are computed again, none is
               lost
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

from engine.batch import ScheduledBatch, ScheduledRequest
from engine.kv_cache.manager import KVCacheManager
from engine.request import Request, RequestStatus
from engine.types import RequestId


class Scheduler(ABC):
    """Base of the policies. A policy is the order in `schedule`; the bookkeeping is here.

    Contract of `schedule`: it may move requests between `waiting` and `running` (through `_admit`
    and `_preempt` only), sets nothing else on a request, and returns a batch within the token
    budget whose blocks are allocated. It returns an empty batch only if there is no request at all.
    Called on the engine's thread only.
    """

    def __init__(
        self, kv_cache: KVCacheManager, *, max_batch_tokens: int, max_requests_per_batch: int
    ) -> None:
        self.kv_cache = kv_cache
        self.max_batch_tokens = max_batch_tokens
        self.max_requests_per_batch = max_requests_per_batch
        self.waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self.running: dict[RequestId, Request] = {}
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        self.waiting[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and give its blocks back. O(its blocks)."""
        request_id = request.request_id
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)
        self.kv_cache.free(request_id)

    @property
    def has_requests(self) -> bool:
        """Whether anything is waiting or running."""
        return bool(self.running) or bool(self.waiting)

    @abstractmethod
    def schedule(self, now: float) -> ScheduledBatch:
        """Choose the next step. `now`: monotonic seconds."""

    def advance(self, scheduled: ScheduledRequest) -> None:
        """Record that a scheduled part was computed. Called by the core, before the next token is
        appended.
        """
        request = scheduled.request
        request.num_computed_tokens = scheduled.start + scheduled.num_tokens
        if scheduled.samples:
            request.status = RequestStatus.DECODING
        self.kv_cache.release_outside_window(request.request_id, request.num_computed_tokens)

    def _admit(self, request: Request, now: float) -> None:
        """Move a waiting request into the batch."""
        del self.waiting[request.request_id]
        self.running[request.request_id] = request
        request.status = RequestStatus.PREFILLING
        if request.first_scheduled is None:
            request.first_scheduled = now

    def _preempt(self, request: Request) -> None:
        """Take a request out of the batch: it frees its blocks and heads the queue."""
        del self.running[request.request_id]
        self.kv_cache.free(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        request.preemptions += 1
        self.num_preemptions += 1
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _scheduled(self, request: Request, num_tokens: int) -> ScheduledRequest:
        """Describe a part whose blocks were allocated."""
        start = request.num_computed_tokens
        return ScheduledRequest(
            request=request,
            start=start,
            num_tokens=num_tokens,
            tables=self.kv_cache.tables(request.request_id),
            samples=start + num_tokens == len(request.token_ids),
        )
