"""What the set-up tells uv of pip's settings."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "install.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("listing", "wanted"),
    [
        ("", {}),
        (":env:.disable-pip-version-check='1'\nglobal.retries='9'\n", {}),
        (
            "global.index-url='https://packages.example/simple'\n"
            "global.extra-index-url='https://a.example/x https://b.example/y'\n",
            {
                "UV_DEFAULT_INDEX": "https://packages.example/simple",
                "UV_INDEX": "https://a.example/x https://b.example/y",
                "UV_INDEX_STRATEGY": "unsafe-best-match",
            },
        ),
        (
            "global.find-links='/a\\n/b'\n:env:.cert='/etc/ssl/own.crt'\ninstall.timeout='180'\n",
            {
                "UV_FIND_LINKS": "/a,/b",
                "SSL_CERT_FILE": "/etc/ssl/own.crt",
                "UV_HTTP_TIMEOUT": "180",
            },
        ),
        ("global.client-cert='/a'\n", None),
        ("install.no-binary=':all:'\nglobal.retries='9'\n", None),
    ],
)
def test_settings_of_pip_as_uv_takes_them(
    script: ModuleType, listing: str, wanted: dict[str, str] | None
) -> None:
    assert script.uv_settings(listing) == wanted


def test_uv_compiles_bytecode_as_pip_does(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    script.install(["a-package"])
    assert commands[-1][-1] == "a-package"
    assert "--compile-bytecode" in commands[-1]
