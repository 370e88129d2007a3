"""A server whose model is divided among processes, as torchrun starts it: real gRPC, one drain."""

from __future__ import annotations

import signal
from pathlib import Path

import headrace
import psutil
import pytest
from headrace import FinishReason
from transformers import GenerationConfig

import engine
from tests.engine.parallel.ranks_rig import BIN, ROOT, launched, needs_ranks, torchrun

DEMO = ROOT / "models" / "demo"
PROMPT = "Once upon a time there was a mill by the river"


@pytest.mark.slow
def test_a_served_model_drains_with_all_its_ranks(tmp_path: Path) -> None:
    needs_ranks()
    address = f"unix:{tmp_path}/s"
    command = torchrun(
        "--no-python",
        str(BIN / "headrace-server"),
        *("serve", "--model", str(DEMO), "--dtype", "float32", "--device", "cpu"),
        *("--threads", "1", "--listen", address, "--hang-timeout", "0"),
    )
    with launched(command, HEADRACE_TENSOR_PARALLEL="auto") as server:
        server.wait_for("Stop it with")
        processes = server.family()
        assert len(processes) == 4, "torchrun, the server, its engine, the other rank"
        with headrace.Client(address) as client:
            result = client.generate(PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
            stream = client.stream(PROMPT, max_tokens=300, temperature=0, ignore_eos=True)
            with stream:
                chunks = iter(stream)
                first = next(chunks)
                server.process.send_signal(signal.SIGTERM)
                rest = list(chunks)
            last = stream.result()
        server.ended()
        psutil.wait_procs(processes, timeout=20)
        assert not any(process.is_running() for process in processes)
        said = server.said
    assert first is not None
    assert rest
    assert last.finish_reason is FinishReason.LENGTH, "the drain lets it finish"
    assert len(last.token_ids) == 300
    assert "Draining: 1 live request," in said
    assert "\nStopped.\n" in said
    assert "rank 1 has ended with rank 0" in said
    assert "RanksLostError" not in said

    whole = engine.load(str(DEMO), dtype="float32", threads=1)
    assert whole.tokenizer is not None
    alone = whole.generate_batch(
        [whole.tokenizer.encode(PROMPT)],
        GenerationConfig(do_sample=False),
        max_new_tokens=24,
        eos_token_id=-1,
        progress_bar=False,
        num_blocks=8,
    )
    assert list(result.token_ids) == list(alone["req_0"].generated_tokens)


def test_torchrun_without_the_option_is_refused() -> None:
    command = [str(BIN / "headrace-server"), "serve", "--model", str(DEMO)]
    with launched(command, RANK="1", WORLD_SIZE="2") as server:
        assert server.ended() == 2
        assert "--tensor-parallel: is none, and torchrun started 2 processes" in server.said


def test_the_option_without_torchrun_is_refused(tmp_path: Path) -> None:
    command = [str(BIN / "headrace-server"), "serve", "--model", str(DEMO)]
    options = ("--tensor-parallel", "auto", "--listen", f"unix:{tmp_path}/s")
    with launched([*command, *options]) as server:
        assert server.ended() == 1
        assert "--tensor-parallel: is auto, and torchrun did not start this process" in server.said
