"""Plans against reality (`make bench-plan`, about four minutes on a quiet machine of two cores).

    model ─▶ headrace-server plan --json ─▶ its command line ─▶ the server ─▶ requests
                        └──────── memory, blocks, times ── compared with ──────┘

For each shape the plan is made of so many requests of one length. Then the server that its last
line names runs just these: first prompts alone, then one request, then all at once. The memory is
the high-water mark of both processes once they are ready; the times of steps are the engine's own,
as ControlService tells them. Shapes other than the demo model have random weights, made on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headrace

from benchmarks.decoder_shapes import FAMILIES, Family
from benchmarks.markdown import cpus, link, memory, span, table
from benchmarks.models import find_model
from benchmarks.records import Record
from benchmarks.rig.measurement import MODELS, Measurement, option
from benchmarks.rig.serving import BIN, Process, serve
from benchmarks.usage import resident

PROMPT, OUTPUT, REQUESTS = 256, 64, 16
_PROMPTS = 3
"""How many prompts are timed alone."""
_POLL_S = 0.02
MEMORY_BOUND, TIME_BOUND = 0.10, 0.30
"""The largest error of a plan, relative to the run."""
_COMMON = {"vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and how it is served.

    Attributes:
        name: the name of the row.
        model: demo, a name of `benchmarks.models`, or a shape with random weights.
    """

    name: str
    model: str | Family
    flags: tuple[str, ...] = ()


def _family(model_type: str, sizes: tuple[int, ...], **settings: int) -> Family:
    return Family("", model_type, sizes, {**_COMMON, **settings})


SHAPES = (
    Shape("demo", "demo"),
    Shape("demo, float32", "demo", ("--dtype", "float32")),
    Shape("0.6B", "qwen3-0.6b"),
    Shape("0.6B, int8", "qwen3-0.6b", ("--quantization", "int8")),
    Shape(
        "sliding windows",
        _family("gemma3_text", (768, 3072, 12, 4, 2), head_dim=128, sliding_window=128),
    ),
    Shape(
        "latent attention",
        _family(
            "deepseek_v3",
            (1024, 4096, 12, 16, 16),
            q_lora_rank=384,
            kv_lora_rank=256,
            qk_rope_head_dim=32,
            qk_nope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=12,
        ),
    ),
    Shape(
        "experts",
        _family(
            "qwen3_moe",
            (1024, 2048, 12, 16, 4),
            moe_intermediate_size=512,
            head_dim=64,
            num_experts=16,
            num_experts_per_tok=4,
        ),
    ),
    Shape("recurrent, 0.8B", FAMILIES["recurrent"]["qwen3_5"]),
    Shape(
        "recurrent alone",
        _family(
            "mamba2",
            (768,),
            num_hidden_layers=16,
            state_size=128,
            num_heads=24,
            head_dim=64,
            n_groups=1,
        ),
    ),
)


def find(shape: Shape, cache: Path) -> Path:
    """Return the directory of a shape's model, which is made if it does not exist."""
    if isinstance(shape.model, str):
        return find_model(shape.model, cache)
    return shape.model.checkpoint(cache / "models" / f"plan-{shape.model.model_type}")


def plan_of(shape: Shape, path: Path) -> dict[str, Any]:
    found = subprocess.run(
        [
            str(BIN / "headrace-server"), "plan", "--json", "--model", str(path), *shape.flags,
            "--requests", str(REQUESTS), "--prompt-tokens", str(PROMPT),
            "--output-tokens", str(OUTPUT),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        text=True,
    )  # fmt: skip
    plan: dict[str, Any] = json.loads(found.stdout)
    return plan


class Run:
    """A server that was planned, and the resources that it uses."""

    def __init__(self, server: Process, client: headrace.Client) -> None:
        self._client = client
        self._random = random.Random(0)
        self._vocabulary = client.model().vocab_size
        for pid in server.tree():  # the plan does not include the peaks of loading
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def prompt_s(self) -> float:
        """Return the seconds that a prompt alone takes: of one step, or of two with states."""
        found = []
        for _ in range(_PROMPTS):
            timings = self._generate(1).timings
            if timings.first_token is None or timings.first_scheduled is None:
                raise RuntimeError("the request has no token")
            found.append(timings.first_token - timings.first_scheduled)
        return statistics.median(found)

    def decode_s(self, requests: int) -> float:
        """Return the seconds of a step in which this many requests decode: the median of the
        observed steps.
        """
        done = threading.Event()
        seen: dict[int, float] = {}

        def watch() -> None:
            while not done.is_set():
                stats = self._client.control.statistics().engine
                if stats.running == requests and not stats.waiting:
                    seen[stats.steps] = stats.last_step_duration.ToTimedelta().total_seconds()
                time.sleep(_POLL_S)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(requests) as callers:
            list(callers.map(self._generate, [OUTPUT] * requests))
        done.set()
        watcher.join()
        # The steps at the beginning may have prompts in them.
        steps = [seconds for _, seconds in sorted(seen.items())]
        return statistics.median(steps[len(steps) // 2 :])

    def _generate(self, output: int) -> headrace.Result:
        prompt = [self._random.randrange(3, self._vocabulary) for _ in range(PROMPT)]
        return self._client.generate(prompt, max_tokens=output, ignore_eos=True, temperature=1.0)


def measure_shape(shape: Shape, cache: Path) -> dict[str, Any]:
    """Return a row of the record: planned and measured."""
    path = find(shape, cache)
    print(f"{shape.name}: planning", flush=True)
    plan = plan_of(shape, path)
    decode = {step["requests"]: step["seconds"] for step in plan["times"]["decode"]}
    sizes = plan["memory_bytes"]
    parts = ("weights", "step", "engine_process", "server_process", "kv_cache")
    planned = {
        "memory_bytes": sum(sizes[part] for part in parts),
        "decode_1_s": decode[1],
        "decode_16_s": decode[REQUESTS],
        "prompt_s": plan["times"]["prefill_s"],
    }
    print(f"{shape.name}: {plan['command']}", flush=True)
    # The command has the model. Without a target time, prompts are computed at once, and then all
    # requests decode.
    flags = shlex.split(plan["command"])[2:]
    with (
        serve(*flags, "--target-step-time", "0", model=path, on_socket=True) as server,
        headrace.Client(server.address) as client,
    ):
        run = Run(server, client)
        taken = {
            "prompt_s": run.prompt_s(),
            "decode_1_s": run.decode_s(1),
            "decode_16_s": run.decode_s(REQUESTS),
            "memory_bytes": sum(resident(pid)[1] for pid in server.tree()),
        }
    row = {
        "name": shape.name,
        "flags": shape.flags,
        "parameters": plan["model"]["parameters"],
        "memory": sizes,
        "planned": planned,
        "taken": taken,
        "load_average": os.getloadavg()[0],
    }
    print(" ".join(f"{name} {ratio(row, name):.2f}" for name in planned), flush=True)
    return row


def measure(options: argparse.Namespace, record: Record) -> None:
    record.data |= {"requests": REQUESTS, "prompt": PROMPT, "output": OUTPUT}
    shapes = [one for one in SHAPES if not options.shape or one.name in options.shape]
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        rows.append(measure_shape(shape, options.cache))
        record.put(rows, "rows")


def ratio(row: Mapping[str, Any], name: str) -> float:
    found: float = row["planned"][name] / row["taken"][name]
    return found


def render(record: Mapping[str, Any], name: str) -> str:
    loads = span((row["load_average"] for row in record["rows"]), ".1f")
    head = (
        f"{record['date'][:10]}, {cpus(record)}, {memory(record)}; load average {loads}. "
        f"{record['requests']} requests of {record['prompt']} + {record['output']} tokens. Commit "
        f"{record['commit']}. {link(name)}"
    )
    columns = "model | memory MiB | step of 1 request ms | step of 16 requests ms | prompt alone ms"
    times = ("decode_1_s", "decode_16_s", "prompt_s")
    rows = [
        [
            row["name"],
            _cell(row, "memory_bytes", 2**-20, MEMORY_BOUND),
            *(_cell(row, one, 1e3, TIME_BOUND) for one in times),
        ]
        for row in record["rows"]
    ]
    return "\n".join([head, "", *table(columns, rows)]) + "\n"


def _cell(row: Mapping[str, Any], name: str, unit: float, bound: float) -> str:
    planned, taken = row["planned"][name] * unit, row["taken"][name] * unit
    off = ratio(row, name) - 1
    text = f"{planned:,.3g}, {taken:,.3g} ({off:+.0%})"
    if planned >= 1000 or taken >= 1000:
        text = f"{planned:,.0f}, {taken:,.0f} ({off:+.0%})"
    return text if abs(off) <= bound else f"**{text}**"


MEASUREMENT = Measurement(
    measure=measure,
    render=render,
    options=(option("shape", [], "a row's name; several times: several", action="append"), MODELS),
)
