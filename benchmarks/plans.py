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
import datetime
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headrace
import psutil

from benchmarks import tables
from benchmarks.models import DEMO, make_model
from benchmarks.processes import ROOT, high_water
from benchmarks.records import commit, machine_record, rounded

FORMAT = 1
_PROMPT, _OUTPUT, _REQUESTS = 256, 64, 16
_PROMPTS = 3
"""How many prompts are timed alone."""
_READY_S = 300.0
_POLL_S = 0.02
_OUTPUT_FILE = ROOT / "benchmarks" / "results" / "plan.json"
_CACHE = Path.home() / ".cache" / "headrace-bench"
_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "num_hidden_layers": 12,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and how it is served.

    Attributes:
        name: the name of the row.
        model: demo, a name of `benchmarks.models`, or a model type of transformers.
        settings: settings of that model type's config.
        flags: flags of plan and serve.
    """

    name: str
    model: str
    settings: dict[str, Any] | None = None
    flags: tuple[str, ...] = ()


SHAPES = (
    Shape("demo", "demo"),
    Shape("demo, float32", "demo", flags=("--dtype", "float32")),
    Shape("0.6B", "qwen3-0.6b"),
    Shape("0.6B, int8", "qwen3-0.6b", flags=("--quantization", "int8")),
    Shape(
        "sliding windows",
        "gemma3_text",
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "sliding_window": 128,
        },
    ),
    Shape(
        "latent attention",
        "deepseek_v3",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 384,
            "kv_lora_rank": 256,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 12,
        },
    ),
    Shape(
        "experts",
        "qwen3_moe",
        {
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "moe_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 16,
            "num_experts_per_tok": 4,
        },
    ),
)


def checkpoint(shape: Shape, folder: Path) -> Path:
    """Return the directory of a shape's model, which is made if it does not exist."""
    if shape.model == "demo":
        return DEMO
    path = folder / "models" / (f"plan-{shape.model}" if shape.settings else shape.model)
    if (path / "config.json").is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if shape.settings is None:
        make_model(shape.model, path)
        return path
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.model, **{**_COMMON, **shape.settings})
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(partial)
    partial.rename(path)
    return path


def plan_of(shape: Shape, path: Path, requests: int) -> dict[str, Any]:
    """Return the command's plan."""
    found = subprocess.run(
        [
            _command(), "plan", "--json", "--model", str(path), *shape.flags,
            "--requests", str(requests), "--prompt-tokens", str(_PROMPT),
            "--output-tokens", str(_OUTPUT),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        text=True,
    )  # fmt: skip
    plan: dict[str, Any] = json.loads(found.stdout)
    return plan


def _command() -> str:
    return str(Path(sys.executable).with_name("headrace-server"))


class Run:
    """A server that was planned, and the resources that it used."""

    def __init__(self, command: str, folder: Path) -> None:
        self._target = f"unix:{folder}/server.sock"
        self._log = (folder / "log").open("w")
        # Without a target time, prompts are computed at once, and then all requests decode.
        words = [_command(), *shlex.split(command)[1:], "--listen", self._target]
        words += ["--target-step-time", "0"]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=self._log)
        self._random = random.Random(0)
        self._client = headrace.Client(self._target)

    def wait_until_ready(self) -> None:
        """Wait until the server is ready. Raises RuntimeError if it ends or takes too long."""
        until = time.monotonic() + _READY_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended; see {self._log.name}")
            try:
                self._vocabulary = self._client.model().vocab_size
                self._forget_peaks()
            except headrace.HeadraceError:
                time.sleep(0.2)
            else:
                return
        raise RuntimeError("the server is not ready")

    def _forget_peaks(self) -> None:
        """Reset the high-water marks, because the plan does not include peaks while loading."""
        for one in self._processes():
            Path(f"/proc/{one.pid}/clear_refs").write_text("5")

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def prompt_s(self) -> float:
        """Return the seconds of a step with only one prompt."""
        found = []
        for _ in range(_PROMPTS):
            self._generate(1)
            found.append(self._step()[1])
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
            list(callers.map(self._generate, [_OUTPUT] * requests))
        done.set()
        watcher.join()
        # The steps at the beginning may have prompts in them.
        steps = [seconds for _, seconds in sorted(seen.items())]
        return statistics.median(steps[len(steps) // 2 :])

    def _generate(self, output: int) -> None:
        prompt = [self._random.randrange(3, self._vocabulary) for _ in range(_PROMPT)]
        self._client.generate(prompt, max_tokens=output, ignore_eos=True, temperature=1.0)

    def _step(self) -> tuple[int, float]:
        stats = self._client.control.statistics().engine
        return stats.steps, stats.last_step_duration.ToTimedelta().total_seconds()

    def peak_bytes(self) -> int:
        """Return the high-water marks of its processes since it was ready."""
        return sum(high_water(one.pid) for one in self._processes())

    def end(self) -> None:
        """End the server."""
        self._client.close()
        self._process.terminate()
        self._process.wait()
        self._log.close()


def measure(shape: Shape, folder: Path, say: Any) -> dict[str, Any]:
    """Return a row of the record: planned and measured."""
    path = checkpoint(shape, folder)
    say(f"{shape.name}: planning")
    plan = plan_of(shape, path, _REQUESTS)
    one = next(step for step in plan["times"]["decode"] if step["requests"] == 1)
    all_ = next(step for step in plan["times"]["decode"] if step["requests"] == _REQUESTS)
    memory = plan["memory_bytes"]
    parts = ("weights", "step", "engine_process", "server_process", "kv_cache")
    planned = {
        "memory_bytes": sum(memory[part] for part in parts),
        "decode_1_s": one["seconds"],
        "decode_16_s": all_["seconds"],
        "prompt_s": plan["times"]["prefill_s"],
    }
    say(f"{shape.name}: {plan['command']}")
    with tempfile.TemporaryDirectory() as place:
        run = Run(plan["command"], Path(place))
        try:
            run.wait_until_ready()
            taken = {
                "prompt_s": run.prompt_s(),
                "decode_1_s": run.decode_s(1),
                "decode_16_s": run.decode_s(_REQUESTS),
                "memory_bytes": run.peak_bytes(),
            }
        finally:
            run.end()
    row = {
        "name": shape.name,
        "flags": shape.flags,
        "parameters": plan["model"]["parameters"],
        "memory": memory,
        "planned": planned,
        "taken": taken,
        "load_average": os.getloadavg()[0],
    }
    say(" ".join(f"{name} {tables.ratio(row, name):.2f}" for name in planned))
    return row


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--shape", action="append", help="a row's name; several times: several")
    parser.add_argument("--cache", type=Path, default=_CACHE, help=f"for models ({_CACHE})")
    parser.add_argument("--output", type=Path, default=_OUTPUT_FILE)
    arguments = parser.parse_args()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))  # ends the server
    wanted = [one for one in SHAPES if not arguments.shape or one.name in arguments.shape]

    def say(line: str) -> None:
        print(line, flush=True)

    rows = [measure(shape, arguments.cache, say) for shape in wanted]
    record = {
        "format": FORMAT,
        "kind": tables.PLAN,
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine_record(),
        "requests": _REQUESTS,
        "prompt": _PROMPT,
        "output": _OUTPUT,
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(rounded(record), indent=1) + "\n")
    print(f"\n{tables.plan(record, arguments.output.name)}")


if __name__ == "__main__":
    main()
