"""The parts that measure. Each is a function of a session. It saves after every turn, and raises
OutOfTime when its time is over.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.floors import Rates, Shape, prompts_s, step_s
from benchmarks.gpu import predict
from benchmarks.gpu.checking import SERVICE, missing
from benchmarks.gpu.record import Part
from benchmarks.gpu.sizes import Sizes, small_sizes, smoke_sizes
from benchmarks.measures import compared, medians
from benchmarks.models import made_once
from benchmarks.processes import SystemFailure
from benchmarks.rig.bench import Bench, Case, Found, OutOfTime, Turn, limits_of
from benchmarks.systems import SystemSpec
from benchmarks.workloads import Lengths, Load

DTYPE = "bfloat16"
ALONE = {"allow_block_sharing": False}
"""Turns the prefix cache off, so that every prompt is computed."""
BATCHING = "benchmarks.adapters.transformers_batching"
JUDGED = 2
"""How many requests' tokens are judged."""
GPU_ONLY = "needs a CUDA device"


def _system(
    name: str,
    module: str = "benchmarks.adapters.headrace_engine",
    *,
    needs_gpu: bool = True,
    **options: Any,
) -> SystemSpec:
    return SystemSpec(name, module, options={**ALONE, **options}, needs_gpu=needs_gpu)


OPTIONS = (
    _system("no graphs", use_cuda_graph=False),
    _system("no overlap", use_async_batching=False),
    _system("no graphs, no overlap", use_cuda_graph=False, use_async_batching=False),
    _system("graphs of decode steps alone", use_cuda_graph=[False, True]),
    _system("decoder of transformers", decoder="transformers"),
    _system("attention in torch", needs_gpu=False, attention="torch"),
)
COMPILING = tuple(
    _system(f"compile level {level}", default_compile_level=level) for level in (1, 2, 3)
)
PEERS = (
    _system("generate_batch", BATCHING, needs_gpu=False, max_batch_tokens=None),
    _system("generate_batch, graphs", BATCHING, use_cuda_graph=True, use_async_batching=True),
    _system(
        "generate_batch, compiled",
        BATCHING,
        use_cuda_graph=True,
        use_async_batching=True,
        default_compile_level=1,
    ),
    _system("generate_batch, flash", BATCHING, attention="flash_attention_2"),
)
ENGINE = _system("headrace", per_request_processors=True)
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""The sampling options in the generation config of Qwen3's checkpoints."""
WAYS: tuple[tuple[str, Mapping[str, Any] | None], ...] = (("", None), (", sampled", SAMPLED))
"""How tokens are chosen: the suffix of a row's key, and the options."""


@dataclass(frozen=True, slots=True)
class Session:
    """What a part is given.

    Attributes:
        part: its place in the record.
        model, shape: its model's name and size.
        cache: the folder for checkpoints.
    """

    part: Part
    bench: Bench
    model: str
    shape: Shape
    device: str
    sizes: Sizes
    cache: Path

    def case(self, key: str, count: int, output: int, **more: Any) -> Case:
        """Return a case of this many requests. key: that of its row. more: see `Case`."""
        return Case(name=key, lengths=[Lengths(self.sizes.prompt, output)] * count, **more)

    def start(self, spec: SystemSpec, cases: Sequence[Case]) -> None:
        """Load a system for these cases. Raises SystemFailure, OutOfTime."""
        self.bench.time.need(spec.name)
        blocks = max(self.sizes.blocks(case) for case in cases)
        options = {"block_size": self.sizes.block, "num_blocks": blocks, **spec.options}
        self.bench.start(dataclasses.replace(spec, options=options), limits_of(cases))

    def measure(self, case: Case, *names: str) -> Turn:
        """Measure a row, which is saved after each turn. Returns the last turn. names: the
        system's, perhaps after that of another one, with which it is compared.
        """
        *references, name = names

        def save(found: Found) -> None:
            row = self._row(found, name, case.name)
            for other in references:
                row["reference"] = self._row(found, other, "")
                turns, others = found.turns[name], found.turns[other]
                row["ratio"] = {
                    figure: compared(others, turns, figure)["median"]
                    for figure in ("output_rate", "decode_rate")
                    if all(figure in one for one in (*others, *turns))
                }
            if case.load.rate is not None:
                row["load"] = case.load.name
                del row["of_floor"]  # as many tokens come as are asked for
            elif not references:
                row["sampling"] = case.sampling
            is_whole = len(row["turns"]) == self.sizes.turns
            self.part.put(row if is_whole else {**row, "partial": True})

        found = Found.of(case, names)
        self.bench.measure(found, self.sizes.turns, save)
        return found.last[name]

    def _row(self, found: Found, name: str, key: str) -> dict[str, Any]:
        """Return a row of the record: medians, and their shares of the floor."""
        lengths, rates = found.case.lengths, medians(found.machine)
        median = medians(found.turns[name])
        limits = Rates(rates["bandwidth"], rates["matrix"])
        prompts = sum(one.prompt for one in lengths)
        floor = {"prefill_rate": prompts / prompts_s(self.shape, lengths, limits)}
        more: dict[str, Any] = {}
        if "context" in median:
            floor["step_s"] = step_s(self.shape, DTYPE, len(lengths), median["context"], limits)
            floor["decode_rate"] = len(lengths) / floor["step_s"]
            steps = predict.decode(self.model, len(lengths), median["context"], limits)
            more = {"predicted": dataclasses.asdict(steps)}
        system = self.bench.running[name]
        return {
            "key": key,
            "system": name,
            "requests": len(lengths),
            "prompt": lengths[0].prompt,
            "output": lengths[0].output,
            "rates": rates,
            "turns": found.turns[name],
            "median": median,
            "floor": floor,
            "of_floor": {
                figure: median[figure] / floor[figure]
                for figure in ("prefill_rate", "decode_rate")
                if figure in floor and figure in median
            },
            "settings": system.ready.get("settings", {}),
            "start_s": system.start_s,
            **more,
        }


def floors(session: Session) -> None:
    """Measure the device's rates and compute the floors that follow from them."""
    turns = []
    for _ in range(session.sizes.turns):
        session.bench.time.need("the rates")
        turns.append(session.bench.rates())
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
    last: Turn | None = None
    cases = [
        session.case(f"decode at {batch}{end}", batch, sizes.output, sampling=sampling)
        for batch in sizes.batches
        for end, sampling in WAYS
    ]
    prefill = session.case("prefill", sizes.prompts, 1)
    profiled = [
        session.case(
            f"busy at {batch}{end}", batch, 4 * sizes.profile_steps + 200, sampling=sampling
        )
        for batch in sizes.profiled
        if batch <= max(sizes.batches)
        for end, sampling in WAYS
    ]
    session.start(ENGINE, [*cases, prefill, *profiled])
    for case in (*cases, prefill):
        if not session.part.has(case.name):
            turn = session.measure(case, ENGINE.name)
            last = turn if case in cases and case.sampling is None else last
    if session.device == "cpu":
        session.part.leave_out("the GPU's busy share", GPU_ONLY)
    for case in profiled:
        if not session.part.has(case.name):
            _profile(session, case)
    session.bench.drop(ENGINE.name)
    if last is not None:
        session.bench.time.need("the check of the tokens")
        session.part.put({"key": "tokens", **session.bench.judge(last, JUDGED)})


def _profile(session: Session, case: Case) -> None:
    """Measure with torch's profiler how much of a steady decode's time the device computes."""
    bench, key = session.bench, case.name
    bench.time.need(key)
    order = bench.order(case, 1, profile_steps=session.sizes.profile_steps)
    try:
        found: dict[str, Any] = bench.ask(ENGINE.name, order)
    except SystemFailure as failure:  # a container may not let anybody profile; the rest goes on
        session.part.leave_out(key, str(failure).splitlines()[0])
        return
    share = found["busy_s"] / found["span_s"]
    requests = len(case.lengths)
    row = {"key": key, "requests": requests, "sampling": case.sampling, "busy_share": share}
    session.part.put({**row, **found})
    bench.say(f"  {key}: {share:.1%} of {found['steps']} steps")


def compare(
    session: Session, variants: Sequence[SystemSpec], batches: Sequence[int] | None = None
) -> None:
    """Compare each system with the engine, which stays loaded. batches: None for the sizes'."""
    batches = batches or session.sizes.pair
    bench, output = session.bench, session.sizes.pair_output
    room = [session.case("room", max(batches), output)]
    for index, variant in enumerate(variants):
        name = variant.name
        if variant.needs_gpu and session.device == "cpu":
            session.part.leave_out(name, GPU_ONLY)
            continue
        cases = [session.case(f"{name} at {batch}", batch, output) for batch in batches]
        missing = [case for case in cases if not session.part.has(case.name)]
        if not missing:
            continue
        try:
            if ENGINE.name not in bench.running:
                session.start(ENGINE, room)
            try:
                session.start(variant, room)
                for case in missing:
                    session.measure(case, ENGINE.name, name)
                bench.drop(name)
            except SystemFailure as failure:
                why = str(failure).splitlines()[0]
                bench.say(f"    left out: {why}")
                session.part.leave_out(name, why)
                bench.close()  # whichever of the two it was
        except OutOfTime:
            rest = ", ".join(one.name for one in variants[index:])
            raise OutOfTime(rest) from None


def grpc(session: Session) -> None:
    """Compare a session of many requests through headrace-server to the engine without it."""
    if absent := missing(*SERVICE):
        session.part.leave_out("gRPC", f"the service needs {absent}")
        return
    server = SystemSpec(
        "headrace-session",
        "benchmarks.adapters.headrace_server",
        options={"style": "session", "flags": ["--no-prefix-cache"]},
        model=str(_checkpoint(session)),
    )
    compare(session, [server], [session.sizes.session])


def _checkpoint(session: Session) -> Path:
    """Return the model on disk, which is made if it does not exist, because a server reads a
    directory.
    """
    clock = session.bench.time
    clock.need("the checkpoint")
    device = session.device.partition(":")[0]
    folder = session.cache / "models" / f"{session.model}-on-{device}"
    code = "make_model(sys.argv[2], folder, device=sys.argv[3])"
    words = (session.model, session.device)
    try:
        return made_once(folder, code, *words, seconds=clock.left_s())
    except subprocess.TimeoutExpired:
        raise OutOfTime("the checkpoint") from None
    except subprocess.CalledProcessError as error:
        raise SystemFailure(f"the checkpoint cannot be made in {folder}: {error}") from error


def itl(session: Session) -> None:
    """Measure the times between tokens while prompts arrive, for each token budget at each rate."""
    sizes = session.sizes
    for budget in sizes.budgets:
        name = "headrace" if budget is None else f"max_batch_tokens {budget}"
        cases = [
            session.case(
                f"{name} at {rate:g}/s",
                max(2, round(rate * sizes.seconds)),
                sizes.output,
                load=Load(rate=rate),
                at_once=sizes.batches[-1],
            )
            for rate in sizes.rates
        ]
        missing = [case for case in cases if not session.part.has(case.name)]
        if missing:
            session.start(_system(name, max_batch_tokens=budget), missing)
            for case in missing:
                session.measure(case, name)
            session.bench.drop(name)


KERNELS = "attention kernels against float64"
GREEDY = "greedy tokens equal model.generate's: qwen3"
"""Keys of checks, as named by `tests.gpu.checks`."""
COMPUTING = frozenset({KERNELS, GREEDY})
SMOKE_S = 240.0


@dataclass(frozen=True, slots=True)
class Measuring:
    """A part: what it measures, with which model, and why.

    Attributes:
        meaning: its description for the terminal.
        needs: keys of the checks without which its results mean nothing.
        sizes: how much it measures, given what the command was asked for.
        most_s: the most seconds that it may take, even if the command allows more.
    """

    run: Callable[[Session], None]
    model: str
    meaning: str
    needs: frozenset[str] = COMPUTING
    sizes: Callable[[Sizes], Sizes] = lambda sizes: sizes
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
    "decode-moe": Measuring(
        decode, "qwen3-moe-13b", "the same of a mixture, 20 layers of Qwen3-30B-A3B's shape"
    ),
    "options": Measuring(
        lambda session: compare(session, OPTIONS),
        "qwen3-8b",
        "graphs, overlap and other options on and off",
    ),
    "compile": Measuring(
        lambda session: compare(session, COMPILING), "qwen3-8b", "the levels of torch.compile"
    ),
    "peers": Measuring(
        lambda session: compare(session, PEERS), "qwen3-8b", "beside transformers' generate_batch"
    ),
    "grpc": Measuring(grpc, "qwen3-4b", "a session through gRPC, beside the engine alone"),
    "itl": Measuring(itl, "qwen3-4b", "times between tokens while prompts arrive"),
}
