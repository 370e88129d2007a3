"""A GPU whose driver is too old is refused in words, and is not passed over for the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.contract.config import LoadConfig
from engine.contract.errors import ModelRefusedError
from engine.loading import driver, loader

OLD = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a GPU, whose files are here."""
    monkeypatch.setattr(driver, "_VERSION", tmp_path / "version")
    monkeypatch.setattr(driver, "_DEVICE", tmp_path / "nvidiactl")
    (tmp_path / "version").write_text(OLD)
    (tmp_path / "nvidiactl").touch()
    return tmp_path


def test_an_old_driver_is_named_with_the_one_that_is_needed(host: Path) -> None:
    why = driver.why_unusable("13.0")
    assert why is not None
    assert (
        "is 535.129.03, but torch was built for CUDA 13.0, which needs driver 580 or newer" in why
    )
    assert driver.why_unusable("12.6") is None
    (host / "version").write_text(OPEN)
    assert driver.why_unusable("13.0") is None
    assert driver.why_unusable("14.1") is None, "what is not known is not refused"


def test_without_a_gpu_nothing_is_refused(host: Path) -> None:
    assert driver.why_unusable(None) is None, "torch is a CPU build"
    (host / "nvidiactl").unlink()
    assert driver.why_unusable("13.0") is None, "a container sees its host's driver"
    (host / "nvidiactl").touch()
    (host / "version").unlink()
    assert driver.why_unusable("13.0") is None


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("wanted", ["auto", "cuda", "cuda:1"])
def test_the_cpu_is_no_substitute(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        ModelRefusedError, match=rf"device is {wanted}, and the NVIDIA driver .* use cpu$"
    ):
        loader._device(LoadConfig(device=wanted))
    assert loader._device(LoadConfig(device="cpu")) == torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert loader._device(LoadConfig()) == torch.device("cpu")
