"""The parts that measure. Each is a function of a session. It saves after every row, and raises
OutOfTime when its time is over.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.floors import Rates, prompts_s, step_s
from benchmarks.gpu.session import DTYPE, Engine, OutOfTime, Session, Sizes, Turn
from benchmarks.measures import medians
from benchmarks.models import made_once
from benchmarks.processes import ROOT, System, SystemFailure
from benchmarks.rig.systems import judged, turn_order
from benchmarks.workloads import Lengths, Load, make_prompts

ALONE = {"allow_block_sharing": False}
"""Turns the prefix cache off, so that every prompt is computed."""
BATCHING = "benchmarks.adapters.transformers_batching"
JUDGE = "benchmarks.adapters.judge"
JUDGED = 2
GPU_ONLY = "needs a CUDA device"


@dataclass(frozen=True, slots=True)
class Variant:
    """A system that is compared with the engine's defaults."""

    engine: Engine
    only_on_gpu: bool = False


def _options(name: str, *, only_on_gpu: bool = True, **options: Any) -> Variant:
    return Variant(Engine(name, options={**ALONE, **options}), only_on_gpu)


def _library(name: str, *, only_on_gpu: bool = True, **options: Any) -> Variant:
    return Variant(Engine(name, BATCHING, {**ALONE, **options}), only_on_gpu)


OPTIONS = (
    _options("no graphs", use_cuda_graph=False),
    _options("no overlap", use_async_batching=False),
    _options("no graphs, no overlap", use_cuda_graph=False, use_async_batching=False),
    _options("graphs of decode steps alone", use_cuda_graph=[False, True]),
    _options("decoder of transformers", decoder="transformers"),
    _options("attention in torch", only_on_gpu=False, attention="torch"),
)
COMPILING = tuple(
    _options(f"compile level {level}", default_compile_level=level) for level in (1, 2, 3)
)
PEERS = (
    _library("generate_batch", only_on_gpu=False, max_batch_tokens=None),
    _library("generate_batch, graphs", use_cuda_graph=True, use_async_batching=True),
    _library(
        "generate_batch, compiled",
        use_cuda_graph=True,
        use_async_batching=True,
        default_compile_level=1,
    ),
    _library("generate_batch, flash", attention="flash_attention_2"),
)
ENGINE = Engine("headrace", options={**ALONE, "per_request_processors": True})
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""The sampling options in the generation config of Qwen3's checkpoints."""
WAYS: tuple[tuple[str, Mapping[str, Any] | None], ...] = (("", None), (", sampled", SAMPLED))
"""How tokens are chosen: the suffix of a row's key, and the options."""


def floors(session: Session) -> None:
    """Measure the device's rates and compute the floors that follow from them."""
    turns = []
    for _ in range(session.sizes.turns):
        session.need_time("the rates")
        turns.append(session.rates())
    rates = medians(turns)
    limits = Rates(rates["bandwidth"], rates["matrix"])
    session.part.put({"key": "rates", "turns": turns, "median": rates})
    context = session.sizes.prompt
    for batch in session.sizes.batches:
        seconds = step_s(session.shape, DTYPE, batch, context, limits)
        session.part.put(
            {
                "key": f"{session.model} at {batch}",
                "model": session.model,
                "requests": batch,
                "context": context,
                "step_s": seconds,
                "decode_rate": batch / seconds,
                "prefill_rate": context / prompts_s(session.shape, [Lengths(context, 1)], limits),
            }
        )


def decode(session: Session) -> None:
    """Measure the engine at each batch size, greedy and sampled, and its prefill. Also profile the
    device, and check that the tokens are right.
    """
    sizes = session.sizes
    engine = session.start(
        ENGINE,
        (max(*sizes.batches, sizes.prompts), sizes.prompt + sizes.output),
        (max(sizes.profiled, default=1), sizes.prompt + _profile_output(session)),
    )
    last: Turn | None = None
    for batch in sizes.batches:
        for end, sampling in WAYS:
            key = f"decode at {batch}{end}"
            if session.part.has(key):
                continue
            lengths = session.lengths(batch, sizes.output)
            session.warm(engine, lengths, sampling)
            turn = _measure(session, engine, key, lengths, sampling)
            last = turn if sampling is None else last
    if not session.part.has("prefill"):
        lengths = session.lengths(sizes.prompts, 1)
        session.warm(engine, lengths)
        _measure(session, engine, "prefill", lengths)
    if session.device == "cpu":
        session.part.leave_out("the GPU's busy share", GPU_ONLY)
    for batch in sizes.profiled:
        for end, sampling in WAYS:
            key = f"busy at {batch}{end}"
            if batch <= max(sizes.batches) and not session.part.has(key):
                _profile(session, engine, batch, key, sampling)
    session.drop(engine)
    if last is not None:
        _judge(session, last)


def _measure(
    session: Session,
    system: System,
    key: str,
    lengths: Sequence[Lengths],
    sampling: Mapping[str, Any] | None = None,
) -> Turn:
    """Measure a row. Returns the last turn."""
    row, last = session.measure(key, system, lengths, sampling=sampling)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in row["of_floor"].items())
    session.say(f"  {key}: {_rate(row['median'])}; of the floor: {shares}")
    return last


def _profile_output(session: Session) -> int:
    return 4 * session.sizes.profile_steps + 200 if session.sizes.profiled else 0


def _profile(
    session: Session, engine: System, batch: int, key: str, sampling: Mapping[str, Any] | None
) -> None:
    """Measure with torch's profiler how much of a steady decode's time the device computes."""
    session.need_time(key)
    lengths = session.lengths(batch, _profile_output(session))
    prompts = make_prompts(lengths, session.shape.vocab_size, seed=77)
    order = turn_order(
        prompts, lengths, sampling=sampling, profile_steps=session.sizes.profile_steps
    )
    try:
        found: dict[str, Any] = session.ask(engine, order)
    except SystemFailure as failure:  # a container may not let anybody profile; the rest goes on
        session.part.leave_out(key, str(failure).splitlines()[0])
        return
    share = found["busy_s"] / found["span_s"]
    row = {"key": key, "requests": batch, "sampling": sampling, "busy_share": share, **found}
    session.part.put(row)
    session.say(f"  {key}: {share:.1%} of {found['steps']} steps")


def _judge(session: Session, turn: Turn) -> None:
    """Check whether some requests' tokens are those of the same weights in float32."""
    session.need_time("the check of the tokens")
    judge = session.start(Engine("judge", JUDGE), (1, session.sizes.prompt))
    requests = [
        {"prompt": prompt, "tokens": reply["tokens"]}
        for prompt, reply in list(zip(turn.prompts, turn.replies, strict=True))[:JUDGED]
    ]
    verdicts = session.ask(judge, {"requests": requests})
    session.part.put({"key": "tokens", **judged(verdicts)})
    session.drop(judge)


def options(session: Session) -> None:
    """Compare the engine with one option changed to the engine as it is."""
    _compare(session, OPTIONS, session.sizes.pair)


def compiling(session: Session) -> None:
    """Compare torch.compile's levels."""
    _compare(session, COMPILING, session.sizes.pair)


def peers(session: Session) -> None:
    """Measure transformers' own continuous batching, with the settings that are available here."""
    _compare(session, PEERS, session.sizes.pair)


def _compare(session: Session, variants: Sequence[Variant], batches: Sequence[int]) -> None:
    """Compare each variant with the engine, which stays loaded. Both alternate with the same
    prompts.
    """
    reference: System | None = None
    total = session.sizes.prompt + session.sizes.pair_output
    for variant in variants:
        name = variant.engine.name
        if variant.only_on_gpu and session.device == "cpu":
            session.part.leave_out(name, GPU_ONLY)
            continue
        missing = [batch for batch in batches if not session.part.has(f"{name} at {batch}")]
        if not missing:
            continue
        try:
            if reference is None:
                reference = session.start(ENGINE, (max(batches), total))
            try:
                system = session.start(variant.engine, (max(batches), total))
                for batch in missing:
                    lengths = session.lengths(batch, session.sizes.pair_output)
                    _pair(session, reference, system, lengths)
                session.drop(system)
            except SystemFailure as failure:
                why = str(failure).splitlines()[0]
                session.say(f"    left out: {why}")
                session.part.leave_out(name, why)
                session.close()  # whichever of the two it was
                reference = None
        except OutOfTime:
            begun = variants.index(variant)
            raise OutOfTime(", ".join(one.engine.name for one in variants[begun:])) from None


def _pair(session: Session, reference: System, system: System, lengths: Sequence[Lengths]) -> None:
    """Run paired turns."""
    for one in (reference, system):
        session.warm(one, lengths)
    key = f"{system.name} at {len(lengths)}"
    row, _ = session.measure(key, system, lengths, reference=reference)
    ratio = row["ratio"]["output_rate"]
    session.say(f"  {key}: {_rate(row['median'])}; headrace / it {ratio:.2f}")


def grpc(session: Session, cache: Path) -> None:
    """Compare a session of many requests through headrace-server to the engine without it."""
    why = _server_missing()
    if why is not None:
        session.part.leave_out("gRPC", f"the service does not import here: {why}")
        return
    directory = _checkpoint(session, cache)
    server = Engine(
        "headrace-session",
        "benchmarks.adapters.headrace_server",
        {"style": "session", "flags": ["--no-prefix-cache"]},
        directory,
    )
    _compare(session, (Variant(server),), (session.sizes.session,))


def _server_missing() -> str | None:
    """Return why the service cannot run here; None if it can."""
    names = (
        "headrace, service.command.cli, service.server, engine.process.worker, engine.structured"
    )
    code = f"import {names}"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if not found.returncode:
        return None
    return (found.stderr.strip().splitlines() or ["no reason was given"])[-1]


def _checkpoint(session: Session, cache: Path) -> Path:
    """Return the model on disk, which is made if it does not exist, because a server reads a
    directory.
    """
    session.need_time("the checkpoint")
    folder = cache / "models" / f"{session.model}-on-{session.device.partition(':')[0]}"
    code = "make_model(sys.argv[2], folder, device=sys.argv[3])"
    words = (session.model, session.device)
    try:
        return made_once(folder, "benchmarks.models", code, *words, seconds=session.left_s())
    except subprocess.TimeoutExpired:
        raise OutOfTime("the checkpoint") from None
    except subprocess.CalledProcessError as error:
        raise SystemFailure(f"the checkpoint cannot be made in {folder}: {error}") from error


def itl(session: Session) -> None:
    """Measure the times between tokens while prompts arrive, for each token budget at each rate."""
    sizes = session.sizes
    total = sizes.prompt + sizes.output
    for budget in sizes.budgets:
        name = "headrace" if budget is None else f"max_batch_tokens {budget}"
        keys = {rate: f"{name} at {rate:g}/s" for rate in sizes.rates}
        if all(session.part.has(key) for key in keys.values()):
            continue
        engine = Engine(name, options={**ALONE, "max_batch_tokens": budget})
        most = sizes.batches[-1]
        system = session.start(engine, (most, total))
        session.warm(system, session.lengths(min(8, most), sizes.output))
        for rate, key in keys.items():
            lengths = session.lengths(max(2, round(rate * sizes.seconds)), sizes.output)
            load = Load(rate=rate)
            row, _ = session.measure(key, system, lengths, load=load)
            p99 = row["median"].get("itl_p99_s", 0.0) * 1e3
            session.say(f"  {key}: ITL p99 {p99:.1f} ms")
        session.drop(system)


def _rate(median: dict[str, float]) -> str:
    text = f"{median['output_rate']:.0f} tok/s"
    if "decode_rate" in median:
        text += (
            f", decode {median['decode_rate']:.0f} tok/s ({median['step_s'] * 1e3:.2f} ms a step)"
        )
    return text


KERNELS = "attention kernels against float64"
GREEDY = "greedy tokens equal model.generate's: qwen3"
"""Keys of checks, as named by `tests.gpu.checks`."""
COMPUTING = frozenset({KERNELS, GREEDY})
SMOKE_BATCHES = (1, 32, 128)
SMOKE_S = 240.0


def smoke_sizes(sizes: Sizes) -> Sizes:
    """One turn of each kind, and a profile of the steps."""
    batches = tuple(batch for batch in SMOKE_BATCHES if batch <= max(sizes.batches))
    return dataclasses.replace(
        sizes,
        batches=batches,
        output=min(sizes.output, 64),
        prompts=min(sizes.prompts, 8),
        profiled=batches if sizes.profiled else (),
        profile_steps=min(sizes.profile_steps, 10),
        turns=1,
    )


def small_sizes(sizes: Sizes) -> Sizes:
    """The smallest and the largest batch, with a profile of both."""
    batches = (min(sizes.batches), max(sizes.batches))
    return dataclasses.replace(
        sizes, batches=batches, profiled=batches if sizes.profiled else (), turns=1
    )


def as_given(sizes: Sizes) -> Sizes:
    """The command's sizes, unchanged."""
    return sizes


@dataclass(frozen=True, slots=True)
class Measuring:
    """A part: what it measures, with which model, and why.

    Attributes:
        run: runs the part.
        model: the model's shape.
        meaning: its description for the terminal.
        needs_cache: whether `run` takes the folder for checkpoints.
        needs: keys of the checks without which its results mean nothing.
        sizes: how much it measures, given what the command was asked for.
        most_s: the most seconds that it may take, even if the command allows more.
    """

    run: Callable[..., None]
    model: str
    meaning: str
    needs_cache: bool = False
    needs: frozenset[str] = COMPUTING
    sizes: Callable[[Sizes], Sizes] = as_given
    most_s: float = math.inf


MEASURING = {
    "smoke": Measuring(
        decode,
        "qwen3-8b",
        "8B's decode once, and what a step launches",
        sizes=smoke_sizes,
        most_s=SMOKE_S,
    ),
    "smoke-0.6b": Measuring(
        decode,
        "qwen3-0.6b",
        "a small model's decode once, where launches and the host count most",
        sizes=small_sizes,
        most_s=SMOKE_S,
    ),
    "floors": Measuring(
        floors, "qwen3-8b", "copy and matrix rates, and what they allow", needs=frozenset()
    ),
    "decode-8b": Measuring(decode, "qwen3-8b", "decode and prefill of Qwen3-8B's shape"),
    "decode-4b": Measuring(decode, "qwen3-4b", "the same of Qwen3-4B's"),
    "options": Measuring(options, "qwen3-8b", "graphs, overlap and other options on and off"),
    "compile": Measuring(compiling, "qwen3-8b", "the levels of torch.compile"),
    "peers": Measuring(peers, "qwen3-8b", "beside transformers' generate_batch"),
    "grpc": Measuring(grpc, "qwen3-4b", "a session through gRPC, beside the engine alone", True),
    "itl": Measuring(itl, "qwen3-4b", "times between tokens while prompts arrive"),
}
