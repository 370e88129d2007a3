"""The command `headrace-server plan`: what it prints, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from engine.contract.config import LoadConfig
from engine.contract.errors import ConfigError, HeadraceError, InsufficientMemoryError
from service.command import flags
from service.command.cli import app
from service.command.planning import FIELDS, described, parse_size
from tests.model_recipes import RECIPES

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo"
COMMAND = [sys.executable, "-c", "from service.command.cli import main; main()"]


def _run_here(*arguments: str) -> Result:
    """In this process, which has imported torch."""
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "plan", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def _demo(folder: Path, **changes: Any) -> Path:
    """A copy of the demo model's config, without weights."""
    folder.mkdir()
    config = json.loads((DEMO / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_command_line_of_a_plan_starts_the_server_that_was_planned() -> None:
    found = _run("--json", "--max-batch-tokens", "256", "--memory", "4GiB", "--no-measure")
    assert found.returncode == 0, found.stderr
    plan = json.loads(found.stdout)
    assert plan["times"] is None
    assert plan["model"]["packing"] in ("native", "onednn", None)
    [group] = plan["kv_cache"]["groups"]
    command = plan["command"]
    assert command.startswith("headrace-server serve --max-batch-tokens 256 --num-blocks ")
    words = [*COMMAND, *shlex.split(command)[1:], "--listen", "127.0.0.1:0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("Ready"):
                break
        server.terminate()
        server.stderr.read()
    told = re.search(r"KV cache: (\d+) MiB, (\d+) blocks", "".join(lines))
    assert told is not None, lines
    assert int(told[2]) == group["blocks"]
    assert int(told[1]) == round(plan["memory_bytes"]["kv_cache"] / 2**20)
    assert f"{plan['model']['parameters']:,} parameters" in lines[-1]
    assert f"up to {plan['kv_cache']['max_requests']} requests" in lines[-1]


def test_a_table_for_a_person(tmp_path: Path) -> None:
    model = _demo(tmp_path / "model")
    rates = ("--bandwidth", "40", "--matrix-rate", "0.4")
    length = ("--prompt-tokens", "100", "--output-tokens", "28", "--requests", "20")
    found = _run_here("--model", str(model), "--memory", "8GiB", *rates, *length)
    assert found.exit_code == 0, found.stderr
    assert "weights " in found.stdout
    assert "KV cache, when full" in found.stdout
    assert "Requests of 100 + 28 tokens: 20 at once" in found.stdout
    assert "step of 16 requests" in found.stdout
    assert "prompt of 100 tokens" in found.stdout
    assert "read at 40.0 GB/s" in found.stdout
    assert "as given" in found.stdout
    assert "the weights are not on this machine" in found.stdout
    assert found.stdout.rstrip().endswith(
        f"serve --model {model} --max-requests-per-batch 20 --num-blocks 89"
    )


def test_adapters_are_planned(tmp_path: Path) -> None:
    """What is printed are the server's own options, with which that many fit."""
    model = _demo(tmp_path / "model")
    asked = ("--model", str(model), "--memory", "4GiB", "--bandwidth", "40", "--matrix-rate", "0.4")
    found = _run_here(*asked, "--adapters", "300", "--adapter-rank", "80")
    assert found.exit_code == 0, found.stderr
    plan, base = (
        json.loads(_run_here("--json", *asked, *more).stdout)
        for more in (("--adapters", "300", "--adapter-rank", "80"), ())
    )
    each = plan["adapters"]["bytes_each"]
    assert re.search(
        r"^adapters +[\d.]+ [MG]iB  300 of rank 80, [\d.]+ MiB each$", found.stdout, re.M
    )
    assert plan["memory_bytes"]["adapters"] == 300 * each > 0
    assert (base["adapters"], base["memory_bytes"]["adapters"]) == (None, 0)
    for one, without in zip(plan["times"]["decode"], base["times"]["decode"], strict=True):
        assert one["seconds"] > without["seconds"]
    assert plan["times"]["prefill_s"] > base["times"]["prefill_s"]
    words = shlex.split(plan["command"])
    options = dict(itertools.pairwise(words))
    config = LoadConfig(
        max_adapters=int(options["--max-adapters"]),
        max_adapter_rank=int(options["--max-adapter-rank"]),
        max_adapter_bytes=int(options["--max-adapter-bytes"]),
    )
    assert (config.max_adapters, config.max_adapter_rank) == (300, 80)
    assert config.max_adapter_bytes == 300 * each
    assert "--max-adapter" not in base["command"]
    told = " ".join(plan["assumptions"])
    assert f"changes all {plan['adapters']['layers']} linear layers" in told
    assert "every request has an adapter" in told
    refused = _run_here(*asked, "--adapters", "1", "--device", "cuda")
    assert refused.exit_code == 2
    assert "--adapters: cannot be served here: the model is on cuda" in refused.stderr


def test_states_of_recurrent_layers_are_told_apart_from_blocks(tmp_path: Path) -> None:
    RECIPES["lfm2"].config(eos_token_id=None).save_pretrained(tmp_path)
    asked = ("--model", str(tmp_path), "--memory", "4GiB", "--no-measure", "--kept-states", "8")
    table = _run_here(*asked)
    assert table.exit_code == 0, table.stderr
    assert "256 bytes a token in 1 layers: 1,024 blocks of 32 tokens; " in table.stdout
    assert "a state in 2 layers: 72 states" in table.stdout
    assert " --kept-states 8 " in table.stdout
    plan = json.loads(_run_here("--json", *asked).stdout)
    told = [(one["bytes_per_state"], one["blocks"]) for one in plan["kv_cache"]["groups"]]
    assert told == [(0, 1024), (1536, 72)]
    # With the null block and the null slot.
    assert plan["memory_bytes"]["kv_cache"] == 1025 * 32 * 256 + 73 * 1536


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--memory", "much"), "--memory: is 'much'; it must be a size such as 16GiB"),
        (("--bandwidth", "40"), "--bandwidth: and --matrix-rate belong together"),
        (("--block-size", "0"), "--block-size: is 0; it must be"),
        (
            ("--adapter-rank", "8"),
            "--adapter-rank: is that of adapters, and there are none; give --adapters, too",
        ),
        (
            ("--quantization", "int3"),
            "--quantization: is 'int3'; it must be one of none, int8, int4, int4-64",
        ),
    ],
)
def test_a_wrong_question_is_refused_before_torch_is_imported(
    arguments: tuple[str, ...], words: str
) -> None:
    found = _run(*arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert words in found.stderr
    assert "importing" not in found.stderr


def test_quantized_weights_are_refused_as_serve_refuses_them(tmp_path: Path) -> None:
    model = _demo(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    found = _run_here("--model", str(model), "--no-measure")
    assert (found.exit_code, found.stdout) == (1, "")
    assert "the weights are quantized already, by 'fp8'" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ConfigError("num_blocks", "follows from requests").naming("requests"),
            "--num-blocks: follows from --requests",
        ),
        (InsufficientMemoryError("lower num_blocks").naming("num_blocks"), "lower --num-blocks"),
        (
            ConfigError("prompt_tokens", "is 3; lower output_tokens").naming("output_tokens"),
            "--prompt-tokens: is 3; lower --output-tokens",
        ),
    ],
)
def test_errors_speak_of_flags(error: HeadraceError, words: str) -> None:
    assert described(error) == words


def test_it_has_flags_of_serve_that_are_there() -> None:
    assert set(FIELDS) <= set(flags.flags())


@pytest.mark.parametrize(
    ("text", "count"),
    [("16GiB", 16 << 30), ("1.5g", 3 << 29), ("512 MiB", 512 << 20), ("2GB", 2 * 10**9), ("7", 7)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1PiB", "1 2"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a size"):
        parse_size(text)
