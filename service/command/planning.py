"""The command `headrace-server plan`: what a server of a model would need, before it is started.

    flags of `serve` that change the answer ─┐
    its own: memory, a request's length, …   ├─▶ engine.planning ─▶ a table, or JSON
    HEADRACE_… variables ────────────────────┘

It runs in one process, reads no weights, and reports its progress on stderr.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.environment import engine_environ
from engine.contract.errors import ConfigError, HeadraceError
from engine.planning.plan_request import Wanted
from service.command import flags
from service.command.config_file import filled
from service.command.serve_options import default_model

if TYPE_CHECKING:
    from engine.planning.plan import Plan

FIELDS = (
    flags.FILE,
    "model",
    "block_size",
    "num_blocks",
    "max_batch_tokens",
    "max_memory_percent",
    "max_requests_per_batch",
    "kept_states",
    "cpu_offload_space",
    "dtype",
    "device",
    "threads",
    "attention",
    "quantization",
    "pack_weights",
    "decoder",
    "tensor_parallel",
)
"""The flags of `serve` that change a plan."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_FAILED = 1
_GROUP = "Plan"


def _flag(name: str) -> str:
    """Return the flag of one of the command's own parameters."""
    return "--" + name.removeprefix("num_").replace("_", "-")


def _own() -> Iterator[inspect.Parameter]:
    def one(name: str, kind: Any, default: Any, help: str, **more: Any) -> inspect.Parameter:
        names = "--measure/--no-measure" if name == "measure" else _flag(name)
        told = typer.Option(names, help=help, rich_help_panel=_GROUP, **more)
        annotation = Annotated[kind, told]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, keyword, default=default, annotation=annotation)

    number, real = int | None, float | None
    yield one(
        "memory",
        str | None,
        None,
        "The memory that there is, such as 16GiB, on the device with --device cuda. Default: what "
        "this machine, or its container, has free now.",
    )
    yield one("prompt_tokens", number, None, "Tokens of a request's prompt. Default: 512.", min=1)
    yield one("output_tokens", number, None, "Tokens of its output. Default: 256.", min=1)
    yield one(
        "requests",
        number,
        None,
        "How many of these are to run at once: the plan then has the flags for that, or says what "
        "is missing.",
        min=1,
        max=65536,
    )
    yield one(
        "bandwidth",
        real,
        None,
        "Memory that is read in a second, in GB. Default: measured.",
        min=0.001,
    )
    yield one(
        "matrix_rate",
        real,
        None,
        "Operations of matrix products in a second, in the model's type, in TFLOP. Default: "
        "measured.",
        min=1e-6,
    )
    yield one(
        "num_adapters",
        int,
        0,
        "How many adapters (LoRA) are loaded at the same time. Assumed: each changes all linear "
        "layers that adapters may change, in the model's type. In the steps whose times are told, "
        "every request has one, and each another as long as there are some; they are made up and "
        "run, or counted as their bytes by --bandwidth and their operations by --matrix-rate.",
        min=0,
        max=4096,
        show_default=False,
    )
    yield one(
        "adapter_rank", number, None, "The rank of these adapters. Default: 16.", min=1, max=1024
    )
    yield one("measure", bool, True, "Measure this machine for the times of steps.")
    yield one("json", bool, False, "Print JSON.")


def _plan(given: flags.Given) -> None:
    """Say what a server of a model would take, without loading its weights.

    Its memory by kind, how many requests of a length run at once, the expected times of steps, and
    the command line that follows. Takes the flags of serve that change the answer.
    """

    try:
        given = filled(given)
        model = given["model"] or default_model()
        load_config = given.config(LoadConfig)
        config = given.config(ContinuousBatchingConfig, per_request_processors=True)
        memory = None if given["memory"] is None else parse_size(given["memory"])
        wanted = Wanted(
            memory=memory,
            prompt_tokens=given["prompt_tokens"],
            output_tokens=given["output_tokens"],
            requests=given["requests"],
            bandwidth=None if given["bandwidth"] is None else given["bandwidth"] * 1e9,
            rate=None if given["matrix_rate"] is None else given["matrix_rate"] * 1e12,
            measures=given["measure"],
            num_adapters=given["num_adapters"],
            adapter_rank=given["adapter_rank"],
        )
        # As in the engine's process, and before torch reads it.
        os.environ.update(engine_environ())
        typer.echo("importing torch and transformers", err=True)
        from engine.planning.plan import make_plan

        plan = make_plan(
            model, config, load_config, wanted, lambda line: typer.echo(line, err=True)
        )
    except ConfigError as error:
        typer.echo(f"headrace-server: {described(error)}", err=True)
        raise typer.Exit(2) from error
    except HeadraceError as error:
        typer.echo(f"headrace-server: {described(error)}", err=True)
        raise typer.Exit(_FAILED) from error
    command = serve_line(given, plan)
    if given["json"]:
        typer.echo(json.dumps(as_json(plan, command), indent=2))
    else:
        typer.echo("\n".join(table(plan, command)))


def described(error: HeadraceError) -> str:
    """Return an error in terms of flags, including the command's own flags."""
    own = {parameter.name: _flag(parameter.name) for parameter in _own()}
    text = flags.describe(error)
    if isinstance(error, ConfigError) and error.option in own:
        text = own[error.option] + text.removeprefix(error.option)
    for name in error.mentions:
        text = text.replace(name, own.get(name, name))
    return text


def parse_size(text: str) -> int:
    """Parse a size in bytes: a number with a unit such as GiB, G or GB.

    Raises:
        ConfigError: the text is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError("memory", f"is {text!r}; it must be a size such as 16GiB")
    number, unit, end = float(found[1]), found[2].upper(), found[3].upper()
    if unit and end == "B":
        return int(number * 1000 ** "KMGT".index(unit) * 1000)
    return int(number * _UNITS[unit])


def serve_line(given: flags.Given, plan: Plan) -> str:
    """Return the command line of the server that was planned."""
    words = ["headrace-server", "serve", *given.line()]
    if plan.config.max_requests_per_batch is not None and given["max_requests_per_batch"] is None:
        words += ["--max-requests-per-batch", str(plan.config.max_requests_per_batch)]
    fixed = plan.memory.is_given or plan.config.num_blocks is not None
    if fixed and given["num_blocks"] is None:
        # With a given memory: the machine that it is planned for may have more.
        blocks = plan.config.num_blocks or max(plan.memory.cache.num_blocks)
        words += ["--num-blocks", str(blocks)]
    if plan.adapters is not None:
        one = plan.adapters
        words += ["--max-adapters", str(one.count), "--max-adapter-rank", str(one.rank)]
        words += ["--max-adapter-bytes", str(one.total_bytes)]
    return shlex.join(words)


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def table(plan: Plan, command: str) -> Iterator[str]:
    """Return the lines of the human-readable output."""
    outline, memory, room = plan.outline, plan.memory, plan.room
    cache = memory.cache
    yield (
        f"{outline.name}: {outline.parameters / 1e6:,.1f} M parameters, "
        f"{str(outline.dtype).removeprefix('torch.')} on {outline.device}, "
        f"{outline.context_length:,} tokens of context"
    )
    yield ""
    where = "given" if memory.is_given else "free here now"
    rows = [("memory", _size(memory.total), where)]
    held = f"packed: {outline.packing.name}" if outline.packing else "as in the checkpoint"
    if outline.checkpoint.stored is not None:
        held = f"{outline.checkpoint.stored.form.described}; others {held}"
    rows += [("weights", _size(memory.weights), held)]
    kinds = (
        ("linear layers", outline.linear.held),
        ("output layer", outline.head.held),
        ("embeddings", outline.embedding.held),
        ("experts", outline.experts_bytes),
        ("norms and the rest", outline.other.held),
    )
    rows += [(f"  {name}", _size(count), "") for name, count in kinds if count]
    rows += [("largest step", _size(memory.step), f"{cache.max_batch_tokens} tokens, about")]
    if plan.adapters is not None:
        told = f"{plan.adapters.count:,} of rank {plan.adapters.rank}, "
        rows += [
            ("adapters", _size(memory.adapters), told + f"{_size(plan.adapters.each_bytes)} each")
        ]
    rows += [
        ("engine's process", _size(memory.engine), "torch, tokenizer, vocabulary"),
        ("server's process", _size(memory.front_end), ""),
        ("KV cache, when full", _size(cache.total_bytes), cache.reason),
    ]
    if cache.host_bytes:
        rows += [("KV on the host", _size(cache.host_bytes), "--cpu-offload-space")]
    yield from _columns(rows)
    yield ""
    groups = [
        (
            f"{_size(group.slot_bytes)} a state in {len(group.layers)} layers: {count:,} states"
            if group.slot_bytes
            else f"{group.bytes_per_token:,} bytes a token in {len(group.layers)} layers"
            + ("" if group.window is None else f" with a window of {group.window:,}")
            + f": {count:,} blocks of {cache.block_size} tokens"
        )
        for group, count in zip(outline.groups, cache.num_blocks, strict=True)
    ]
    yield "KV: " + "; ".join(groups)
    yield (
        f"Requests of {room.prompt_tokens:,} + {room.output_tokens:,} tokens: {room.requests:,} at "
        f"once ({_size(room.request_bytes)} of KV each; the cache holds {room.cache_requests:,}, "
        f"and {cache.max_requests:,} may run)"
    )
    yield ""
    yield from _times(plan)
    yield ""
    yield "Assumed:"
    yield from (f"- {line}" for line in assumptions(plan))
    yield ""
    yield command


def _columns(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, note in rows:
        yield f"{name:{first}}  {value:>{second}}  {note}".rstrip()


def _times(plan: Plan) -> Iterator[str]:
    if plan.times is None:
        yield "Times of steps: no rates; give --bandwidth and --matrix-rate"
        return
    times = plan.times
    yield f"Expected times, behind {times.context:,} tokens each:"
    rows = []
    for one in times.decode:
        name = f"step of {one.requests:,} request{'s' if one.requests > 1 else ''}"
        rows.append((name, _time(one.seconds), f"{one.requests / one.seconds:,.0f} tokens/s"))
    rate = times.prompt_tokens / times.prefill_s
    name = f"prompt of {times.prompt_tokens:,} tokens"
    rows.append((name, _time(times.prefill_s), f"{rate:,.0f} tokens/s"))
    yield from _columns(rows)


def assumptions(plan: Plan) -> Iterator[str]:
    """Return the assumptions behind the figures."""
    outline = plan.outline
    if plan.times is not None:
        rates = plan.times.rates
        if rates is None:
            yield (
                "its steps take as long as they took just now, here, with made-up weights; other "
                "work on the machine makes them slower"
            )
        else:
            yield (
                f"memory is read at {rates.bandwidth / 1e9:.1f} GB/s and matrices are multiplied "
                f"at {rates.rate / 1e12:.3g} TFLOP/s, as given"
            )
        yield "a prompt is computed alone, and shares no prefix; the front end is not counted"
    if plan.adapters is not None:
        one = plan.adapters
        yield (
            f"each adapter changes all {len(one.layers)} linear layers that adapters may change, "
            f"in {str(one.dtype).removeprefix('torch.')}; tensors that its file has in float32 or "
            "float16 are held in float32"
        )
        yield (
            "while an adapter is loaded, its file and its tensors are in memory besides: not "
            "counted"
        )
        if plan.times is not None:
            yield (
                "in a step every request has an adapter, and each another as long as there are some"
            )
        yield (
            "adapters come with --adapter NAME=DIR, or are loaded from below --adapter-root DIR, "
            "for which the server leaves the memory free: add one of them"
        )
    if outline.device.type == "cuda":
        yield "plans of CUDA devices were never compared with a run"
        yield "the processes are in the host's memory, and 0.5 GiB of the device is its context"
    else:
        yield "the KV cache gets its memory as tokens are written: less at first, at last all"
    if outline.own_decoder:
        yield "our decoder computes the layers, as a comparison at load allows"
    if outline.experts:
        yield "a checkpoint with experts takes more for a moment while it is read: not counted"
    if not outline.checkpoint.files:
        yield "the weights are not on this machine: what their files say was not looked at"


def as_json(plan: Plan, command: str) -> dict[str, Any]:
    """Return the plan for programs: sizes in bytes, times in seconds."""
    outline, memory = plan.outline, plan.memory
    cache = memory.cache
    return {
        "model": {
            "path": str(outline.checkpoint.path),
            "architecture": outline.name,
            "parameters": outline.parameters,
            "dtype": str(outline.dtype).removeprefix("torch."),
            "device": str(outline.device),
            "packing": outline.packing and outline.packing.name,
            "quantized": outline.checkpoint.stored and outline.checkpoint.stored.form.label,
            "context_tokens": outline.context_length,
        },
        "memory_bytes": {
            "total": memory.total,
            "weights": memory.weights,
            "linear": outline.linear.held,
            "head": outline.head.held,
            "embedding": outline.embedding.held,
            "experts": outline.experts_bytes,
            "other": outline.other.held,
            "step": memory.step,
            "adapters": memory.adapters,
            "engine_process": memory.engine,
            "server_process": memory.front_end,
            "kv_cache": cache.total_bytes,
            "kv_host": cache.host_bytes,
        },
        "kv_cache": {
            "block_size": cache.block_size,
            "reason": cache.reason,
            "max_batch_tokens": cache.max_batch_tokens,
            "max_requests": cache.max_requests,
            "groups": [
                {
                    "layers": len(group.layers),
                    "window": group.window,
                    "bytes_per_token": group.bytes_per_token,
                    "bytes_per_state": group.slot_bytes,
                    "blocks": count,
                }
                for group, count in zip(outline.groups, cache.num_blocks, strict=True)
            ],
        },
        "adapters": None
        if plan.adapters is None
        else {
            "count": plan.adapters.count,
            "rank": plan.adapters.rank,
            "layers": len(plan.adapters.layers),
            "bytes_each": plan.adapters.each_bytes,
        },
        "room": dataclasses.asdict(plan.room),
        "times": None if plan.times is None else dataclasses.asdict(plan.times),
        "assumptions": list(assumptions(plan)),
        "command": command,
    }


plan = flags.command_of(_plan, only=FIELDS, more=tuple(_own()))
