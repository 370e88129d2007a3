"""`headrace-server pull`, `models` and `rm` at a terminal, and the same download in `serve`: the
real command, the demo model, and a hub on loopback.
"""

import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.engine.hub.loopback_hub import Hub, Repository, running
from tests.gguf_files import all_of
from tests.gguf_models import write
from tests.service.real_server import BIN, ROOT, clean_environment, real_server

COMMAND = str(BIN / "headrace-server")
DEMO = {
    name: (ROOT / "models" / "demo" / name).read_bytes()
    for name in ("config.json", "tokenizer.json", "model.safetensors")
}
SIZE = sum(map(len, DEMO.values()))


def variables(hub: Hub, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": ""}


def call(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *words],
        env=clean_environment(**variables(hub, home)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_pull_is_interrupted_resumed_listed_and_removed(tmp_path: Path) -> None:
    with running({"org/demo": Repository(DEMO)}) as hub:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [COMMAND, "pull", "org/demo"],
            env=clean_environment(**variables(hub, tmp_path)),
            stdin=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        hub.behaviour.rate = 6e6
        hub.behaviour.on_bytes = lambda sent: (
            process.send_signal(signal.SIGINT) if 5e6 < sent < 5.1e6 else None
        )
        seen = b""
        while True:
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:  # it has ended
                break
        os.close(ours)
        assert process.wait(30) == 130
        shown = seen.decode()
        assert re.search(r"\rdownloading:  \d+%\|\S+ *\| [\d.]+M/9\.\d+M \[\d\d:\d\d<", shown)
        assert max(map(len, re.split(r"[\r\n]+|\x1b\[K", shown.split("free\r\n")[1]))) < 80
        assert "interrupted: what has come stays" in shown

        listed = call(hub, tmp_path, "models").stdout
        assert re.search(r"org/demo +[45]\.\d+ MB +incomplete +no: its download was interr", listed)
        before = hub.sent
        hub.behaviour.rate, hub.behaviour.on_bytes = float("inf"), lambda sent: None
        again = call(hub, tmp_path, "pull", "org/demo")
        assert again.returncode == 0, again.stderr
        assert "; 5." in again.stderr.splitlines()[1]
        assert hub.sent - before < len(DEMO["model.safetensors"]) - 4e6
        assert "org/demo is here: headrace-server serve --model org/demo" in again.stderr
        assert (Path(again.stdout.strip()) / "config.json").read_bytes() == DEMO["config.json"]

        listed = call(hub, tmp_path, "models").stdout
        assert re.search(r"org/demo +9\.\d+ MB +main \(0123456789ab\) +yes\n", listed)
        assert "incomplete" not in listed
        asked = call(hub, tmp_path, "rm", "org/demo")
        assert (asked.returncode, "give --yes" in asked.stderr) == (2, True)
        removed = call(hub, tmp_path, "rm", "org/demo", "--yes")
        assert removed.stdout.startswith("removed org/demo: 9."), removed
        assert "no models in" in call(hub, tmp_path, "models").stdout


def test_a_gguf_file_is_pulled_listed_and_planned(tmp_path: Path) -> None:
    file, _ = write(tmp_path / "made", "llama", all_of("Q8_0"))
    names = ("tiny-Q8_0.gguf", "tiny-Q8_0-b.gguf")
    with running({"org/demo": Repository(dict.fromkeys(names, file.read_bytes()))}) as hub:
        home = tmp_path / "home"
        for wanted in ("org/demo", "org/demo:Q8_0"):
            told = call(hub, home, "pull", wanted)
            assert (told.returncode, told.stderr.count("\n")) == (1, 1)
            assert "give one of org/demo:tiny-Q8_0-b.gguf, org/demo:tiny-Q8_0.gguf" in told.stderr
        pulled = call(hub, home, "pull", "org/demo:tiny-Q8_0.gguf", "--revision", "v1")
        assert pulled.returncode == 0, pulled.stderr
        model = "org/demo@v1:tiny-Q8_0.gguf"
        assert f"{model} is here: headrace-server serve --model {model}" in pulled.stderr
        assert Path(pulled.stdout.strip()).read_bytes() == file.read_bytes()
        listed = call(hub, home, "models").stdout
        assert re.search(r"org/demo:tiny-Q8_0.gguf +[\d.]+ MB +v1 \(0123456789ab\) +yes\n", listed)
        assert listed.count("\n") == 2
        hub.log.clear()
        planned = call(hub, home, "plan", "--model", model)
        assert planned.returncode == 0, planned.stderr
        assert not hub.log


def test_serve_downloads_and_says_so_where_it_is_asked(tmp_path: Path) -> None:
    with running({"org/demo": Repository(DEMO)}) as hub:
        hub.behaviour.rate = 3e6
        socket = f"unix:{tmp_path}/s"
        words = ("--model", "org/demo", "--listen", socket)
        with real_server(*words, **variables(hub, tmp_path)) as server:
            server.read_until("downloading: ")
            server.read_until("checking whether")
            with grpc.insecure_channel(socket) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest(service="headrace.v1.GenerationService")
                reason = ""
                while "downloaded" not in reason:
                    answer, rpc = stub.Check.with_call(request, timeout=10, wait_for_ready=True)
                    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
                    reason = dict(rpc.trailing_metadata())["headrace-reason"]
            assert re.fullmatch(
                r"the model is still being downloaded, [\d.]+ \w+ of 9\.\d+ MB", reason
            )
            probe = subprocess.run(
                [str(BIN / "python"), str(ROOT / "deploy" / "healthcheck.py"), socket],
                capture_output=True,
                text=True,
                check=False,
            )
            assert probe.returncode == 1
            assert "NOT_SERVING: the model is still being downloaded" in probe.stderr
            server.wait_until_ready()
            assert re.search(r"started in .* download [1-9]\.\d, ", server.said)
            refused = call(hub, tmp_path, "rm", "org/demo", "--yes")
            assert "is used by a running server" in refused.stderr
            assert refused.returncode == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("pull", "org/none"), 1, "the hub has no model org/none, or it is private"),
        (("pull", "org/demo@v1", "--revision", "v2"), 2, "give the revision once"),
        (("pull", "org/demo@v1:Q8_0", "--revision", "v2"), 2, "give the revision once"),
        (("rm", "org/demo@v1"), 2, "with all its revisions"),
        (("rm", "org/demo:Q8_0"), 2, "and files: give OWNER/NAME"),
        (("rm", "org/demo"), 1, "org/demo is not in "),
    ],
)
def test_mistakes(tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    with running({}) as hub:
        found = call(hub, tmp_path, *words)
    assert (found.returncode, found.stderr.count("\n")) == (code, 1)
    assert found.stderr.startswith("headrace-server: ")
    assert said in found.stderr
