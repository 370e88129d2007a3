"""What a session takes on the wire: bytes of its answers for each token, and what they are.

    headrace-server serve ──StreamResultResponse──▶ this process: the size of each message

Several requests run on one session of a real server, by default with the demo model. All are added
at the same time, with ids as long as a UUID without dashes, and run to their full length. Only the
messages' own bytes are counted, from Accepted to Finished. The 5 bytes of gRPC's message header and
HTTP/2's frames are not, because all requests of a step share them. A client that reads slowly gets
several tokens in one event, and fewer bytes for each. A run therefore counts only if (nearly) every
token came in a separate event.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from benchmarks.records import Record
from benchmarks.rig.load import messages
from benchmarks.rig.measurement import MODEL, Measurement, option
from benchmarks.rig.serving import serve

MOST_MERGED = 0.02
"""The largest share of tokens that may arrive in an event with others."""
KINDS = ("text", "ids")
PARTS = ("accepted", "prompt", "finished")
PROMPTS = (
    "Once upon a time there was a",
    "The little dog wanted to",
    "One day, Lily and her mother went to the",
    "Tom had a big red",
)


def specs(kind: str, requests: int, tokens: int, run: int) -> Iterator[pb.GenerationSpec]:
    for index in range(requests):
        yield pb.GenerationSpec(
            request_id=f"{run:016x}{index:016x}",
            text=pb.TextInput(text=PROMPTS[index % len(PROMPTS)]),
            stop=pb.StopOptions(max_tokens=tokens, ignore_eos=True),
            output=pb.OutputOptions(omit_text=kind == "ids"),
        )


def add_fields(counted: Counter[str], path: str, message: Message) -> None:
    """Count the bytes of each of a message's fields, including tag and length."""
    for field, value in message.ListFields():
        alone: Any = type(message)()
        if isinstance(value, Message):
            getattr(alone, field.name).CopyFrom(value)
        elif isinstance(value, str | bytes | bool | int | float):
            setattr(alone, field.name, value)
        else:
            getattr(alone, field.name).MergeFrom(value)
        counted[f"{path}.{field.name}"] += alone.ByteSize()


def add_message(counted: Counter[str], message: rpc.StreamResultResponse) -> None:
    """Count the bytes of a message by purpose."""
    whole = message.ByteSize()
    counted["total"] += whole
    counted["messages"] += 1
    alone = rpc.StreamResultResponse()
    for event in message.events:
        alone.events.append(event)
        size = alone.ByteSize()  # with its tag and its length
        del alone.events[:]
        whole -= size
        kind = event.WhichOneof("event")
        counted[kind] += size
        counted[f"{kind} events"] += 1
        if kind == "delta":
            add_fields(counted, "event", event)
            counted["event.delta"] -= event.delta.ByteSize()  # leaves its tag and its length
            counted["event"] += size - event.ByteSize()
            add_fields(counted, "delta", event.delta)
            counted["tokens"] += len(event.delta.token_ids)
        else:
            add_fields(counted, kind, getattr(event, kind))
    counted["besides events"] += whole


def measure(address: str, kind: str, requests: int, tokens: int, run: int) -> Counter[str]:
    counted: Counter[str] = Counter()
    for message in messages(address, specs(kind, requests, tokens, run)):
        add_message(counted, message)
    if counted["tokens"] != requests * tokens or counted["finished events"] != requests:
        raise RuntimeError(f"{counted['tokens']} tokens came, not {requests} times {tokens}")
    return counted


def merged_share(counted: Counter[str]) -> float:
    """Return the share of a session's tokens that came in an event after other tokens."""
    return 1 - counted["delta events"] / counted["tokens"]


def measure_kind(address: str, kind: str, options: argparse.Namespace) -> list[Counter[str]]:
    """Return the sessions of a kind that count. Raises RuntimeError if too many of them had merged
    events, because the machine is busy.
    """
    found: list[Counter[str]] = []
    for run in range(3 * options.runs):
        counted = measure(address, kind, options.requests, options.tokens, run)
        if merged_share(counted) <= MOST_MERGED:
            found.append(counted)
        if len(found) == options.runs:
            return found
    raise RuntimeError("in most sessions tokens were merged in one event: is the machine busy?")


def summary(runs: list[Counter[str]]) -> dict[str, Any]:
    """Return what the sessions of a kind have in common: the bytes per token, and what they consist
    of.
    """
    total: Counter[str] = sum(runs, Counter())
    tokens = total["tokens"]
    each = [run["total"] / run["tokens"] for run in runs]

    def fields(part: str, each: int) -> dict[str, float]:
        mark = f"{part}."
        return {
            name.removeprefix(mark): count / each
            for name, count in total.items()
            if name.startswith(mark)
        }

    return {
        "bytes_a_token": total["total"] / tokens,
        "bytes_a_token_of_runs": each,
        "spread_of_runs": statistics.pstdev(each),
        "merged_share": merged_share(total),
        "of_it": {
            part: total[part] / tokens for part in ("delta", *PARTS, "failed", "besides events")
        },
        "delta_fields": {
            "event's tag and length": total["event"] / tokens,
            "request_number": total["event.request_number"] / tokens,
            "seq": total["event.seq"] / tokens,
            "delta's tag and length": total["event.delta"] / tokens,
            **fields("delta", tokens),
        },
        "bytes_a_request": {
            part: {"whole event": total[part] / events, **fields(part, events)}
            for part in PARTS
            for events in (total[f"{part} events"],)
        },
    }


def measure_all(options: argparse.Namespace, record: Record) -> None:
    with serve("--log-level", "warning", model=options.model, on_socket=True) as server:
        runs = {kind: measure_kind(server.address, kind, options) for kind in KINDS}
    for kind, found in runs.items():
        record.put(summary(found), "kinds", kind)


MEASUREMENT = Measurement(
    measure=measure_all,
    options=(
        MODEL,
        option("requests", 32, "on one session"),
        option("tokens", 64, "of each request"),
        option("runs", 5, "sessions that count"),
    ),
)
