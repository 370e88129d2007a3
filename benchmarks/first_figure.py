"""The first figure: the server beside transformers' own generation, on one workload, in one run.

Workload: 32 requests at once, prompts of 16 to 256 random tokens, 16 to 128 tokens out, greedy, no
end-of-sequence.

    server    `headrace-server serve`, one gRPC session over a Unix socket; prefixes are not shared
    together  the same with `--in-process`: front end and engine in one process
    padded    transformers' `generate` on the padded batch, to the longest output; the wanted tokens
              count
    batching  transformers' `generate_batch`, with a cache sized to the workload

They take turns (A B C D, A B C D, …), since a machine's speed drifts; medians and ratios are
reported. All use the same weights, type and threads. Greedy tokens are compared: equal in float32,
in bfloat16 up to near-ties.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import headrace
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the workload: its prompt, and how many tokens it generates."""

    prompt: tuple[int, ...]
    max_tokens: int


def make_workload(vocab_size: int, count: int = 32, seed: int = 0) -> list[Request]:
    """The workload; the same for the same seed."""
    draw = random.Random(seed)
    return [
        Request(
            prompt=tuple(draw.randrange(10, vocab_size) for _ in range(draw.randint(16, 256))),
            max_tokens=draw.randint(16, 128),
        )
        for _ in range(count)
    ]


def run_server(client: headrace.Client, workload: Sequence[Request]) -> Tokens:
    """All requests on one session."""
    with client.session() as session:
        handles = [
            session.submit(
                request.prompt,
                max_tokens=request.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                omit_text=True,
                bypass_prefix_cache=True,  # the same prompts come in every turn
            )
            for request in workload
        ]
        return [list(handle.result().token_ids) for handle in handles]


def run_padded(model: PreTrainedModel, workload: Sequence[Request]) -> Tokens:
    """One padded batch, generated to the longest output."""
    longest = max(len(request.prompt) for request in workload)
    ids = torch.zeros(len(workload), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(workload):
        ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, longest - len(request.prompt) :] = 1
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(request.max_tokens for request in workload),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    rows = output[:, longest:].tolist()
    return [row[: request.max_tokens] for row, request in zip(rows, workload, strict=True)]


def run_batching(model: PreTrainedModel, workload: Sequence[Request]) -> Tokens:
    """transformers' own continuous batching, pages of 32 and a cache of 1.25 times the workload."""
    from transformers import ContinuousBatchingConfig

    tokens = sum(len(request.prompt) + request.max_tokens for request in workload)
    config = ContinuousBatchingConfig(
        block_size=32, num_blocks=max(64, tokens * 5 // 4 // 32), max_batch_tokens=1024
    )
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=128, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        names = [
            manager.add_request(list(request.prompt), max_new_tokens=request.max_tokens)
            for request in workload
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=120)
            if result is None:
                raise RuntimeError("transformers' generate_batch gave no result for 120 s")
            if result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
    return [found[name] for name in names]


def start_server(
    arguments: argparse.Namespace, address: str, *more: str
) -> subprocess.Popen[bytes]:
    """A server, with more flags."""
    command = [
        str(Path(sys.executable).with_name("headrace-server")), "serve",
        "--model", arguments.model, "--listen", address, "--dtype", arguments.dtype,
        "--threads", str(arguments.threads), "--log-level", "warning", *more,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def agreement(one: Tokens, other: Tokens) -> float:
    """The part of the tokens that two runs have in common before they first differ, on average."""
    shares = []
    for left, right in zip(one, other, strict=True):
        same = 0
        while same < min(len(left), len(right)) and left[same] == right[same]:
            same += 1
        shares.append(same / max(1, len(right)))
    return statistics.fmean(shares)


def measure(
    systems: dict[str, Callable[[], Tokens]], repeats: int, total: int
) -> tuple[dict[str, list[float]], dict[str, Tokens]]:
    """Run the systems in turn; output tokens per second of each run, and the last tokens."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    tokens: dict[str, Tokens] = {}
    for turn in range(repeats + 1):  # the first turn warms up and does not count
        for name, run in systems.items():
            started = time.perf_counter()
            tokens[name] = run()
            seconds = time.perf_counter() - started
            if turn:
                rates[name].append(total / seconds)
            print(f"  turn {turn}: {name:9} {total / seconds:8.0f} tok/s", flush=True)
    return rates, tokens


def report(
    arguments: argparse.Namespace,
    rates: dict[str, list[float]],
    tokens: dict[str, Tokens],
    total: int,
) -> dict[str, object]:
    """Print the table and make the record."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    paired = {
        name: statistics.median(a / b for a, b in zip(rates["server"], values, strict=True))
        for name, values in rates.items()
    }
    print(f"\n{'system':10} {'median tok/s':>12} {'server / it':>12} {'same tokens':>12}")
    for name, median in medians.items():
        share = agreement(tokens["server"], tokens[name])
        print(f"{name:10} {median:12.0f} {paired[name]:12.2f} {share:12.1%}")
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "workload": "32 requests, 16-256 in, 16-128 out, greedy, random prompts, seed 0",
        "model": Path(arguments.model).name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "output_tokens": total,
        "tokens_per_second": rates,
        "median": medians,
        "server_ratio": paired,
        "agreement": {name: agreement(tokens["server"], tokens[name]) for name in tokens},
        "load_average": os.getloadavg(),
        "machine": {
            "cpu": _cpu_name(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "grpcio", "headrace-server")
        },
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/demo", help="a model directory")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3, help="turns that count")
    parser.add_argument("--output", type=Path, help="write the record to this JSON file")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype)
    ).eval()
    batching = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), attn_implementation="sdpa"
    ).eval()
    workload = make_workload(model.config.vocab_size)
    total = sum(request.max_tokens for request in workload)
    with tempfile.TemporaryDirectory() as directory:
        address, together = (f"unix:{directory}/{name}.sock" for name in ("two", "one"))
        servers = [
            start_server(arguments, address),
            start_server(arguments, together, "--in-process"),
        ]
        try:
            with headrace.Client(address) as client, headrace.Client(together) as in_process:
                client.wait_until_ready(timeout=120)
                in_process.wait_until_ready(timeout=120)
                systems: dict[str, Callable[[], Tokens]] = {
                    "server": lambda: run_server(client, workload),
                    "together": lambda: run_server(in_process, workload),
                    "padded": lambda: run_padded(model, workload),
                    "batching": lambda: run_batching(batching, workload),
                }
                rates, tokens = measure(systems, arguments.repeats, total)
        finally:
            for server in servers:
                server.send_signal(signal.SIGTERM)
            for server in servers:
                server.wait(60)
    record = report(arguments, rates, tokens, total)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
        print(f"\nwritten to {arguments.output}")


if __name__ == "__main__":
    main()
