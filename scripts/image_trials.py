"""Trials of what an image must do. Each reports whether the image passes, and what was observed."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from image_box import WAIT_S, Box
from image_sbom import inside

USER = 10001
ANOTHER = 23456
GENERATE = (
    "headrace",
    "generate",
    "Once upon a time",
    "--temperature",
    "0",
    "-o",
    "ignore_eos=true",
)
COMPILERS = ("gcc", "cc", "g++", "c++", "clang", "cpp", "as", "ld", "make")


def try_out(
    root: Path, config: dict[str, Any], torch: str, *, torch_at: Path | None
) -> dict[str, Any]:
    """Run all trials.

    Args:
        root: the image's file system, mounted.
        config: the image's configuration.
        torch: cuda or cpu.
        torch_at: a folder with a real torch to mount over an empty stand-in in the image, or None.
    """

    def box(user: int = USER, **more: Any) -> Box:
        # HF_HUB_OFFLINE: the box has no network.
        env = {"HF_HUB_OFFLINE": "1"} | ({"PYTHONPATH": "/models"} if torch_at else {})
        env |= more.pop("env", {})
        mounts: dict[str, Path] = {}
        if torch_at:
            site = next(root.glob("opt/headrace/lib/python*/site-packages")).relative_to(root)
            mounts = {"/models": torch_at, f"/{site}/torch": torch_at / "torch"}
        return Box(root, config, user=user, mounts=mounts, env=env, **more)

    trials: dict[str, Callable[[], dict[str, Any]]] = {
        "serves": lambda: _serves(box(), config),
        "another user": lambda: _serves(box(ANOTHER), config),
        # In float32, where the same request has the same tokens, whatever runs beside it.
        "drains": lambda: _drains(box(env={"HEADRACE_DTYPE": "float32"}), config),
        "ends at once on a second signal": lambda: _second_signal(box()),
        "a model that is not there": lambda: _refuses(box(env={"HEADRACE_MODEL": "/models/no"}), 1),
        "a wrong option": lambda: _refuses(box(command=["serve", "--max-queue-size", "0"]), 2),
        "compilers": lambda: _compilers(root, torch),
    }
    return {name: trial() for name, trial in trials.items()}


def _check(box: Box, config: dict[str, Any], *more: str) -> int:
    """Return the exit code of the image's own health check."""
    command = config["Healthcheck"]["Test"]
    assert command[0] == "CMD"
    return box.run(*command[1:], *more)[0]


def _serves(box: Box, config: dict[str, Any]) -> dict[str, Any]:
    """Check readiness, a streamed request, and that only /tmp is writable."""
    with box:
        box.read_until("port open")
        live = _check(box, config, "127.0.0.1:50051", "")
        box.read_until("Ready in")
        ready_s = time.monotonic() - box.began
        ready = _check(box, config)
        client = box.start(*GENERATE, "--max-tokens", "64")
        assert client.stdout is not None
        pieces = 0
        while client.stdout.read(1):
            pieces += 1
        client.stdout.close()
        answered = client.wait(WAIT_S)
        written = box.run("sh", "-c", "touch /opt/x || touch /x || touch /etc/x")[0]
        status = box.run("cat", "/proc/1/status")[1]
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        user, capabilities = facts["Uid"].split()[0], facts["CapEff"]
        resident = box.resident_bytes()
        box.signal(signal.SIGTERM)
        code = box.wait()
    return {
        "holds": (live, ready, answered, code) == (0, 0, 0, 0)
        and pieces > 0
        and written != 0
        and int(capabilities, 16) == 0
        and facts["NoNewPrivs"] == "1",
        "ready_after_s": round(ready_s, 1),
        "characters_streamed": pieces,
        "uid": int(user),
        "capabilities": capabilities,
        "root_is_read_only": written != 0,
        "resident_mb": round(resident / 1e6),
        "exit_code": code,
    }


def _drains(box: Box, config: dict[str, Any]) -> dict[str, Any]:
    """Send SIGTERM in the middle of a stream. The stream must continue to its end, and the server
    must not be ready meanwhile.
    """
    with box:
        box.read_until("Ready in")
        command = (*GENERATE, "--max-tokens", "1000")
        _, undisturbed = box.run(*command)
        client, begun = _begun(box, *command)
        box.signal(signal.SIGTERM)
        box.read_until("draining")
        during = _check(box, config)
        rest, _ = client.communicate(timeout=WAIT_S)
        code = box.wait()
    whole = begun + rest == undisturbed
    return {
        # Not its exit code: the kernel ends what is in the box with the box's first process.
        "holds": whole and during == 1 and code == 0,
        "characters": len(undisturbed),
        "characters_received": len(begun + rest),
        "client_exit_code": client.returncode,
        "before_the_signal": len(begun),
        "same_text_as_undisturbed": whole,
        "health_check_meanwhile": during,
        "exit_code": code,
    }


def _begun(box: Box, *command: str) -> tuple[subprocess.Popen[str], str]:
    """Start a client and wait for its first character."""
    client = box.start(*command)
    assert client.stdout is not None
    return client, client.stdout.read(1)


def _second_signal(box: Box) -> dict[str, Any]:
    with box:
        box.read_until("Ready in")
        client, _ = _begun(box, *GENERATE, "--max-tokens", "1000")
        box.signal(signal.SIGTERM)
        box.read_until("draining")
        box.signal(signal.SIGTERM)
        code = box.wait()
        client.kill()
        client.wait(WAIT_S)
    return {"holds": code == 143, "exit_code": code}


def _refuses(box: Box, expected: int) -> dict[str, Any]:
    with box:
        code = box.wait()
        box.read_rest()
    said = [line.strip() for line in box.said if line.strip()]
    return {"holds": code == expected, "exit_code": code, "said": said[-1] if said else ""}


def _compilers(root: Path, torch: str) -> dict[str, Any]:
    """Check the compilers: none for CPUs; for CUDA only the C compiler that Triton needs."""
    look = f"for name in {' '.join(COMPILERS)}; do command -v $name || true; done"
    found = [Path(line).name for line in inside(root, "sh", "-c", look).split()]
    wanted = not found if torch == "cpu" else "gcc" in found and not {"g++", "c++"} & set(found)
    return {"holds": wanted, "found": found}
