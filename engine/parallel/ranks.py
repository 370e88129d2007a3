"""The processes that share a tensor-parallel model, and their communication.

    rank 0   ── messages ──▶  the others      gloo, on the host: what to compute next
    each rank ◀── sums ───▶  each rank        gloo on CPUs, NCCL on CUDA: inside the model's layers

torchrun starts the processes and assigns their ranks. The model's own collectives use the default
process group, as transformers expects. Messages use another group, in which a rank may wait for
days.

However a process ends, its connections close, and ranks that wait for it fail. So no rank outlives
the others for long. While a model is loaded, all ranks do the same work. A rank that refuses the
model writes its reason to the rendezvous store, then closes its connections, so all ranks end with
that reason.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from engine.contract.config import LoadConfig
from engine.contract.environment import RankPlace
from engine.contract.errors import ConfigError, HeadraceError, ModelRefusedError, RanksLostError
from engine.parallel.rank_messages import Message

logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a live rank may keep the others waiting inside the model, or while loading."""
_IDLE_TIMEOUT = timedelta(days=3650)
"""How long rank 0 may have nothing to compute."""
_FRAME_BYTES = 4096
"""The size of the first broadcast. Most messages for decode steps fit in it, and longer messages
take two broadcasts.
"""
_SIZE_BYTES = 8
_REASON_KEY = "headrace/reason"
_REFERENCES = 2
"""The result of `sys.getrefcount` for an attribute without other references. It includes the
argument.
"""
_LET_GO_S = 1.0


class Store(Protocol):
    """The required interface of the rendezvous store."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Return a key's value. If the key does not exist and `expected` is empty, set it first."""
        ...


class Ranks:
    """This process as one of those that share the model.

    Attributes:
        place: its rank, and the number of ranks.
        device: the device of its shard of the model.
    """

    def __init__(
        self, place: RankPlace, device: torch.device, store: Store, messages: dist.ProcessGroup
    ) -> None:
        """Wrap the connections that `join` has set up.

        Args:
            place, device: see the class.
            store: the rendezvous store.
            messages: the process group on the host.
        """
        self.place = place
        self.device = device
        self._store = store
        self._messages = messages
        self._frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which runs the engine."""
        return self.place.rank == 0

    def send(self, message: Message) -> None:
        """Send a message to all other ranks. Called by rank 0.

        Raises:
            RuntimeError: a rank is gone.
        """
        payload = self._encoder.encode(message)
        head = len(payload).to_bytes(_SIZE_BYTES, "little") + payload
        first, rest = head[:_FRAME_BYTES], head[_FRAME_BYTES:]
        self._frame[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        dist.broadcast(self._frame, src=0, group=self._messages)
        if rest:
            tail = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
            dist.broadcast(tail, src=0, group=self._messages)

    def receive(self) -> Message:
        """Wait for a message from rank 0. Called by the other ranks.

        Raises:
            RuntimeError: a rank is gone.
            msgspec.DecodeError: the data is not a message.
        """
        dist.broadcast(self._frame, src=0, group=self._messages)
        head = self._frame.numpy().tobytes()
        size = int.from_bytes(head[:_SIZE_BYTES], "little")
        payload = head[_SIZE_BYTES : _SIZE_BYTES + size]
        if len(payload) < size:
            tail = torch.zeros(size - len(payload), dtype=torch.uint8)
            dist.broadcast(tail, src=0, group=self._messages)
            payload += tail.numpy().tobytes()
        return self._decoder.decode(payload)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the element-wise minimum of all ranks' values. Called by all ranks.

        Raises:
            RuntimeError: a rank is gone.
        """
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self._messages)
        return tuple(numbers.tolist())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a `with` block on all ranks. If it fails on one rank, it fails on all, with the same
        reason.

        Raises:
            ModelRefusedError: another rank has failed. The message has its number and its reason.
            RanksLostError: another rank is gone, and has left no reason.
        """
        try:
            yield
            self.least([1])
        except Exception as error:
            own = _reason(error)
            rank, reason = self._first_reason(own)
            self.leave()
            if rank == self.place.rank or reason == own:
                raise
            if reason:
                raise ModelRefusedError(f"rank {rank}: {reason}") from error
            if isinstance(error, HeadraceError):
                raise
            raise RanksLostError("another rank has ended while the model was loaded") from error

    def leave(self) -> None:
        """Close the connections, so that ranks waiting for this one fail. Harmless if repeated.

        The process may end after this call, so it first waits until Gloo has released the last
        message. Gloo's thread releases the tensor shortly after sending it. From torch 2.13 on,
        this needs the interpreter, and aborts the process if the interpreter has already ended. The
        tensor's reference count shows when it has been released.
        """
        deadline = time.monotonic() + _LET_GO_S
        while sys.getrefcount(self._frame) > _REFERENCES and time.monotonic() < deadline:
            time.sleep(0.001)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _first_reason(self, own: str) -> tuple[int, str]:
        """Return the first rank that failed, and its reason.

        The reason is empty if the store is gone, together with the process that hosted it. own:
        this rank's reason, which is recorded if it is the first.
        """
        mine = f"{self.place.rank} {own}"
        try:
            kept = self._store.compare_set(_REASON_KEY, "", mine).decode()
        except RuntimeError:
            return -1, ""
        rank, _, reason = kept.partition(" ")
        return int(rank), reason


def join(load_config: LoadConfig, place: RankPlace | None) -> Ranks | None:
    """Connect to the other ranks. Return None if there are none.

    Args:
        load_config: whether the model is split, and on which type of device.
        place: the rank of this process, or None if torchrun did not start it.

    Raises:
        ConfigError: the model cannot be split in this process.
        RanksLostError: the other ranks do not connect.
    """
    if load_config.tensor_parallel == "none":
        return None
    if place is None:
        raise ConfigError(
            "tensor_parallel",
            "is auto, and torchrun did not start this process; start it with "
            "torchrun --nproc-per-node N, or set it to none",
        )
    if place.world_size == 1:
        logger.info("tensor_parallel is auto, and torchrun started one process: nothing is divided")
        return None
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            "tensor_parallel",
            "is auto, and the package accelerate, which transformers needs for it, is not "
            "installed; install headrace-server[tensor-parallel]",
        )
    if dist.is_initialized():
        raise ConfigError(
            "tensor_parallel",
            "is auto, and this process belongs to a process group already: a process has part of "
            "one model only, and its group is made as it is loaded",
        )
    device = rank_device(load_config, place)
    on_cuda = device.type == "cuda"
    try:
        store, rank, size = next(iter(rendezvous("env://")))
        store.set_timeout(_COLLECTIVE_TIMEOUT)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=device if on_cuda else None,
        )
        messages = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        raise RanksLostError(f"the ranks did not come together: {error}") from error
    return Ranks(place, device, store, messages)


def rank_device(load_config: LoadConfig, place: RankPlace) -> torch.device:
    """Return the device of a rank. transformers splits models across a machine's accelerators if it
    has any.

    Raises:
        ConfigError: that device is not available.
    """
    if not torch.cuda.is_available():
        if load_config.device == "cuda":
            raise ConfigError("device", "is cuda, but torch finds no CUDA device here; use cpu")
        return torch.device("cpu")
    if load_config.device == "cpu":
        raise ConfigError(
            "device",
            "is cpu, and there are CUDA devices, over which transformers divides a model; set it "
            'to cuda, or hide them (CUDA_VISIBLE_DEVICES="")',
        )
    if place.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            "tensor_parallel",
            f"torchrun started {place.local_world_size} processes on this machine, which has "
            f"{torch.cuda.device_count()} CUDA devices; lower --nproc-per-node",
        )
    return torch.device("cuda", place.local_rank)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
