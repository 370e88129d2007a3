"""A server whose answers can be computed by hand: it says the prompt's words back, one token a
word.

The first word of a prompt is its stage direction:
`hold` says one word and waits to be released or cancelled; `refuse` and `busy` are refused
(`busy` twice, then taken); `fail` fails after a word; `gap` loses an event; `twice` repeats one;
`drop` ends the whole stream; `defect` is refused with INTERNAL, and ends a whole session with it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.rpc import (  # type: ignore[import-untyped]  # it ships none
    code_pb2,
    error_details_pb2,
    status_pb2,
)
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from headrace.v1 import generation_pb2 as g
from headrace.v1 import generation_service_pb2 as s
from headrace.v1 import model_service_pb2 as m
from headrace.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    add_GenerationServiceServicer_to_server,
)
from headrace.v1.model_service_pb2_grpc import (
    ModelServiceServicer,
    add_ModelServiceServicer_to_server,
)

WAIT = 10.0  # seconds; a bound for what must happen, never a pause


def make_status(code: int, reason: str, message: str, *details: Any, **metadata: str) -> Any:
    status = status_pb2.Status(code=code, message=message)
    info = error_details_pb2.ErrorInfo(reason=reason, domain="headrace", metadata=metadata)
    for detail in (info, *details):
        packed = AnyProto()
        packed.Pack(detail)
        status.details.append(packed)
    return status


class Refusal(Exception):
    def __init__(self, status: Any) -> None:
        super().__init__(status.message)
        self.status = status


def abort(context: Any, status: Any) -> None:
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    code = next(one for one in grpc.StatusCode if one.value[0] == status.code)
    context.abort(code, status.message)


class Live:
    """A request that the server runs."""

    def __init__(self, spec: g.GenerationSpec, sink: Callable[[list[g.ResultEvent]], None]) -> None:
        self.spec = spec
        self.sink = sink
        self.number = 0  # on the session that it is on
        self.seq = 0
        self.sent: list[g.ResultEvent] = []
        self.by_itself = False

    def send(self, **event: Any) -> None:
        self.seq += 1
        one = g.ResultEvent(seq=self.seq, **event)
        self.sent.append(one)
        self.sink([self.numbered(one)])

    def numbered(self, event: g.ResultEvent) -> g.ResultEvent:
        """An event as the session has it."""
        one = g.ResultEvent(request_number=self.number)
        one.MergeFrom(event)
        return one

    @property
    def done(self) -> bool:
        ends = [e for e in self.sent if e.WhichOneof("event") in ("finished", "failed")]
        return len(ends) == (self.spec.n or 1) or any(e.HasField("failed") for e in ends)


class ScriptedServer(GenerationServiceServicer, ModelServiceServicer):
    def __init__(self, address: str = "127.0.0.1:0", token: str = "") -> None:
        self.changed = threading.Condition()
        self.live: dict[str, Live] = {}
        self.kept: dict[str, Live] = {}
        self.specs: list[g.GenerationSpec] = []
        self.cancelled: list[str] = []
        self.commands: list[s.StreamResultRequest] = []
        self.token_metadata: list[str] = []
        self.peak = 0
        self.total = 0
        self.finish_at = 0
        self.busy_left = 2
        self.unavailable_left = 0
        self.answer_bytes = 1 << 20
        self.polls: list[s.GetResultRequest] = []
        self.on_poll: Callable[[], None] = lambda: None
        self._made = 0
        self._server = grpc.server(
            futures.ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)]
        )
        add_GenerationServiceServicer_to_server(self, self._server)
        add_ModelServiceServicer_to_server(self, self._server)
        self.health = health.HealthServicer()
        self.health.set("headrace.v1.GenerationService", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        port = self._server.add_insecure_port(address)
        self.target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait(WAIT)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT)

    @property
    def credits(self) -> list[int]:
        return [one.credit.tokens for one in self.commands if one.HasField("credit")]

    def release(self, request_id: str) -> None:
        with self.changed:
            self._finish(self.live[request_id])

    # ---- the engine ----

    def start(
        self,
        spec: g.GenerationSpec,
        sink: Callable[[list[g.ResultEvent]], None],
        command: int = 0,
        number: int = 0,
    ) -> Live:
        with self.changed:
            self.specs.append(spec)
            if not spec.request_id:
                self._made += 1
                spec.request_id = f"made-{self._made}"
            if spec.request_id in self.live:
                raise Refusal(make_status(code_pb2.ALREADY_EXISTS, "DUPLICATE_ID", "it lives"))
            words = self._words(spec)
            self._check(words[0] if words else "")
            live = Live(spec, sink)
            live.number = number
            self.live[spec.request_id] = self.kept[spec.request_id] = live
            self.peak = max(self.peak, len(self.live))
            accepted = g.Accepted(
                request_id=spec.request_id, prompt_tokens=len(words), n=spec.n or 1
            )
            accepted.command_id = command
            accepted.sampling.seed = spec.sampling.seed or 7
            live.send(accepted=accepted)
            live.send(prompt=g.PromptProcessed(prompt_tokens=len(words)))
            self._play(live, words)
            if self.finish_at and (
                len(self.live) >= self.finish_at or len(self.specs) >= self.total
            ):
                count = len(self.live) if len(self.specs) >= self.total else 1
                for one in list(self.live.values())[:count]:
                    self._finish(one)
            self.changed.notify_all()
            return live

    def cancel(self, request_id: str) -> s.CancelStatus.ValueType:
        with self.changed:
            live = self.live.get(request_id)
            if live is None:
                ended = request_id in self.kept
                return s.CANCEL_STATUS_ALREADY_FINISHED if ended else s.CANCEL_STATUS_NOT_FOUND
            self.cancelled.append(request_id)
            self._finish(live, g.FINISH_REASON_CANCELLED)
            return s.CANCEL_STATUS_CANCELLED

    def lose(self, request_id: str) -> None:
        """The request's RPC is gone."""
        if request_id not in self.kept or not self.kept[request_id].by_itself:
            self.cancel(request_id)

    def _words(self, spec: g.GenerationSpec) -> list[str]:
        kind = spec.WhichOneof("input")
        if kind == "tokens":
            return [str(id_) for id_ in spec.tokens.ids]
        text = spec.text.text if kind == "text" else spec.chat.messages[-1].content
        return text.split()

    def _check(self, direction: str) -> None:
        if direction == "refuse":
            violation = error_details_pb2.BadRequest.FieldViolation(
                field="sampling.top_p", description="must be above 0"
            )
            bad = error_details_pb2.BadRequest(field_violations=[violation])
            raise Refusal(
                make_status(code_pb2.INVALID_ARGUMENT, "BAD_FIELD", "top_p is wrong", bad)
            )
        if direction == "defect":
            raise Refusal(make_status(code_pb2.INTERNAL, "ENGINE_FAULT", "broken"))
        if direction == "unsupported":
            raise Refusal(make_status(code_pb2.UNIMPLEMENTED, "NOT_SUPPORTED", "not yet"))
        if direction == "busy" and self.busy_left > 0:
            self.busy_left -= 1
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(20)
            raise Refusal(make_status(code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry))

    def _play(self, live: Live, words: list[str]) -> None:
        direction = words[0] if words else ""
        if direction == "fail":
            live.send(delta=g.Delta(token_ids=[1], text="so far"))
            status = make_status(code_pb2.INTERNAL, "ENGINE_FAULT", "broken", error_id="e-1")
            del self.live[live.spec.request_id]
            live.send(failed=g.Failed(status=status))
            return
        if direction == "hold":
            live.send(delta=g.Delta(token_ids=[4], text="hold"))
            return
        limit = live.spec.stop.max_tokens if live.spec.stop.HasField("max_tokens") else len(words)
        for place, word in enumerate(words[:limit]):
            delta = g.Delta(text=(" " if place else "") + word)
            if live.spec.output.HasField("logprobs"):
                delta.tokens.add(id=len(word), text=word, bytes=word.encode(), logprob=-0.5)
            else:
                delta.token_ids.append(len(word))
            if direction == "gap" and place == 1:
                live.seq += 1
            if direction == "twice" and place == 1:
                live.seq -= 1
            live.send(delta=delta)
        if not self.finish_at:
            stopped = g.FINISH_REASON_STOP if limit >= len(words) else g.FINISH_REASON_LENGTH
            self._finish(live, stopped, min(limit, len(words)))

    def _finish(
        self,
        live: Live,
        reason: g.FinishReason.ValueType = g.FINISH_REASON_STOP,
        tokens: int = 1,
    ) -> None:
        del self.live[live.spec.request_id]
        usage = g.Usage(prompt_tokens=2, completion_tokens=tokens)
        for index in range(live.spec.n or 1):
            finished = g.Finished(reason=reason, usage=usage)
            finished.timings.first_token_duration.FromMilliseconds(250)
            if live.spec.stop.stop_strings and reason == g.FINISH_REASON_STOP:
                finished.stop_string = live.spec.stop.stop_strings[0]
            live.send(finished=finished, choice_index=index)
        self.changed.notify_all()

    # ---- GenerationService ----

    def Generate(self, request: Any, context: Any) -> Any:
        self.token_metadata += [v for k, v in context.invocation_metadata() if k == "authorization"]
        if self.unavailable_left:
            self.unavailable_left -= 1
            abort(context, make_status(code_pb2.UNAVAILABLE, "LOADING", "loading"))
        events: queue.SimpleQueue[g.ResultEvent | None] = queue.SimpleQueue()
        live = self._start_call(request.spec, context, events)
        answer = s.GenerateResponse(request_id=live.spec.request_id)
        choice = answer.choices.add()
        for event in self._until_done(events, live):
            kind = event.WhichOneof("event")
            if kind == "accepted":
                answer.accepted.CopyFrom(event.accepted)
            elif kind == "prompt":
                answer.prompt.CopyFrom(event.prompt)
            elif kind == "delta":
                choice.text += event.delta.text
                choice.token_ids.extend(event.delta.token_ids)
                choice.token_ids.extend(token.id for token in event.delta.tokens)
                choice.tokens.extend(event.delta.tokens)
            elif kind == "finished":
                choice.finished.CopyFrom(event.finished)
                answer.usage.CopyFrom(event.finished.usage)
            else:
                abort(context, event.failed.status)
        return answer

    def GenerateStream(self, request: Any, context: Any) -> Iterator[Any]:
        events: queue.SimpleQueue[g.ResultEvent | None] = queue.SimpleQueue()
        live = self._start_call(request.spec, context, events)
        for event in self._until_done(events, live):
            yield s.GenerateStreamResponse(events=[event])
            if event.HasField("failed"):
                abort(context, event.failed.status)

    def _start_call(
        self, spec: Any, context: Any, events: queue.SimpleQueue[g.ResultEvent | None]
    ) -> Live:
        def sink(batch: list[g.ResultEvent]) -> None:
            for event in batch:
                events.put(event)

        try:
            live = self.start(spec, sink)
        except Refusal as refusal:
            abort(context, refusal.status)
            raise
        if not context.add_callback(lambda: self.lose(live.spec.request_id)):
            self.lose(live.spec.request_id)
        return live

    def _until_done(
        self, events: queue.SimpleQueue[g.ResultEvent | None], live: Live
    ) -> Iterator[g.ResultEvent]:
        ends = 0
        while ends < (live.spec.n or 1):
            event = events.get(timeout=WAIT)
            assert event is not None
            ends += event.HasField("finished")
            yield event
            if event.HasField("failed"):
                return

    def AddRequest(self, request: Any, context: Any) -> Any:
        try:
            live = self.start(request.spec, lambda events: None)
            live.by_itself = True
        except Refusal as refusal:
            abort(context, refusal.status)
            raise
        return s.AddRequestResponse(request_id=live.spec.request_id, accepted=live.sent[0].accepted)

    def Cancel(self, request: Any, context: Any) -> Any:
        answer = s.CancelResponse()
        for request_id in request.request_ids:
            answer.results.add(request_id=request_id, status=self.cancel(request_id))
        return answer

    def GetResult(self, request: Any, context: Any) -> Any:
        live = self.kept.get(request.request_id)
        if live is None:
            abort(context, make_status(code_pb2.NOT_FOUND, "NO_SUCH_REQUEST", "not here"))
            raise AssertionError
        wanted = max(request.from_seq, 1)
        with self.changed:
            self.polls.append(request)
            self.on_poll()
            self.changed.wait_for(
                lambda: live.done or (live.seq >= wanted and not request.until_done),
                min(request.wait.ToNanoseconds() / 1e9, WAIT),
            )
            events: list[g.ResultEvent] = []
            for event in live.sent[wanted - 1 :]:  # as many as fit, at least one
                if events and sum(e.ByteSize() for e in [*events, event]) > self.answer_bytes:
                    break
                events.append(event)
            following = wanted + len(events)
            done = live.done and following > live.seq
        return s.GetResultResponse(events=events, next_seq=following, done=done)

    def StreamResult(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        mine: list[str] = []  # one for each number that was given, so an id may come again
        state = {"half_closed": False, "lost": False}

        def sink(events: list[g.ResultEvent]) -> None:
            out.put(s.StreamResultResponse(events=events))

        def read() -> None:
            try:
                for command in requests:
                    self._command(command, sink, out, mine)
            except grpc.RpcError:
                return
            except Refusal as refusal:
                out.put(refusal)
                return
            state["half_closed"] = True
            out.put(None)

        def end() -> None:
            for one in mine:
                self.lose(one)
            state["lost"] = True
            out.put(None)

        context.add_callback(end)
        threading.Thread(target=read, daemon=True).start()
        while True:
            if state["lost"]:
                return
            if state["half_closed"] and out.empty() and not (self.live.keys() & mine):
                return
            item = out.get(timeout=WAIT * 3)
            if isinstance(item, Refusal):
                abort(context, item.status)
            if item is not None:
                yield item

    def _command(
        self, command: Any, sink: Any, out: queue.SimpleQueue[Any], mine: list[str]
    ) -> None:
        with self.changed:
            self.commands.append(command)
        kind, id_ = command.WhichOneof("command"), command.command_id
        if kind == "open":
            opened = s.SessionOpened(command_id=id_, lease=command.open.lease)
            response = s.StreamResultResponse(opened=opened)
            if command.open.HasField("load_interval"):
                response.load.CopyFrom(s.ServerLoad(running=3, waiting=2, kv_cache_usage=0.5))
            out.put(response)
        elif kind == "add":
            spec = command.add.spec
            if spec.text.text.startswith("drop"):
                raise Refusal(make_status(code_pb2.UNAVAILABLE, "DRAINING", "going away"))
            mine.append(spec.request_id)
            try:
                self.start(spec, sink, id_, len(mine))
            except Refusal as refusal:
                if refusal.status.code == code_pb2.INTERNAL:
                    raise
                rejection = s.CommandRejection(
                    command_id=id_, request_id=spec.request_id, status=refusal.status
                )
                out.put(s.StreamResultResponse(rejections=[rejection]))
        elif kind == "cancel":
            result = s.CancelResult(request_id=command.cancel.request_id, command_id=id_)
            result.status = self.cancel(command.cancel.request_id)
            out.put(s.StreamResultResponse(cancelled=[result]))
        elif kind == "attach":
            live = self.kept[command.attach.request_id]
            attached = s.SessionAttached(
                command_id=id_, request_id=live.spec.request_id, from_seq=command.attach.from_seq
            )
            mine.append(live.spec.request_id)
            with self.changed:
                attached.request_number = live.number = len(mine)
                events = [
                    live.numbered(event)
                    for event in live.sent
                    if event.seq >= command.attach.from_seq
                ]
                out.put(s.StreamResultResponse(attached=[attached], events=events))
                live.sink = sink
        with self.changed:
            self.changed.notify_all()

    # ---- ModelService ----

    def GetModel(self, request: Any, context: Any) -> Any:
        card = m.ModelCard(name="scripted", vocab_size=100)
        card.limits.max_context_tokens = 64
        card.limits.max_lease.FromSeconds(90)
        card.limits.max_hold.FromMilliseconds(1500)
        card.capabilities.names.append("chat")
        card.capabilities.input.chat = True
        return m.GetModelResponse(model=card)

    def Tokenize(self, request: Any, context: Any) -> Any:
        text = request.text.text or request.chat.messages[-1].content
        return m.TokenizeResponse(token_ids=[len(word) for word in text.split()])

    def Detokenize(self, request: Any, context: Any) -> Any:
        return m.DetokenizeResponse(text=" ".join("x" * id_ for id_ in request.token_ids))


if __name__ == "__main__":  # for tests that want it in a process of its own
    import sys

    running = ScriptedServer()
    sys.stdout.write(running.target + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    running.stop()
