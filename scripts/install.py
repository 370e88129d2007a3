"""Installs what Headrace needs into the virtual environment of the Python that runs this.

    install.py         what serving needs
    install.py --dev   what the checks and tests need too

pip installs uv, which then installs the rest in a third of the time that pip would need. uv gets
pip's settings (the index, links, certificate, proxy). If uv is not available, fails, or has no
equivalent for one of pip's settings, pip installs everything.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ("-c", "constraints.txt")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""pip's settings, and the environment variables that set the same for uv."""
_HARMLESS = {
    "disable-pip-version-check",
    "no-cache-dir",
    "no-color",
    "no-input",
    "no-python-version-warning",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
}
"""pip's settings that do not change what is installed or from where."""


def uv_settings(listing: str) -> dict[str, str] | None:
    """Return the environment in which uv does what pip would do; None if uv has no equivalent for
    one of pip's settings.

    Args:
        listing: the output of `pip config list`, a line `where.name='value'` for each setting.
    """
    found: dict[str, str] = {}
    for line in listing.splitlines():
        place, _, value = line.partition("=")
        name = place.rpartition(".")[2]
        if name in _HARMLESS:
            continue
        if name not in _UV_NAMES:
            return None
        text = str(ast.literal_eval(value))
        # Lists are separated by white space for pip; by commas for one of uv's.
        variable = _UV_NAMES[name]
        found[variable] = (",".join if variable == "UV_FIND_LINKS" else " ".join)(text.split())
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip takes the best of all indexes
    return found


def install(packages: list[str]) -> None:
    """Install packages with uv or pip.

    Raises:
        subprocess.CalledProcessError: pip failed and has printed the reason.
    """
    began = time.monotonic()
    name = "uv" if _by_uv(packages) else "pip"
    if name == "pip":
        pip = [*_PIP, "install", "--quiet", "--progress-bar", "on", *CONSTRAINTS, *packages]
        subprocess.run(pip, cwd=ROOT, check=True)
    sys.stdout.write(f"    installed by {name} in {time.monotonic() - began:.0f} s\n")


def _by_uv(packages: list[str]) -> bool:
    listed = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, check=True)
    settings = uv_settings(listed.stdout)
    if settings is None:
        return False
    get_uv = [*_PIP, "install", "--quiet", *CONSTRAINTS, "uv"]
    if subprocess.run(get_uv, cwd=ROOT, capture_output=True).returncode:
        return False
    uv = [sys.executable, "-m", "uv", "pip", "install", "--system-certs"]
    # As pip does; else the first start would, and each that may not write.
    uv += ["--python", sys.executable, "--compile-bytecode"]
    return not subprocess.run(
        [*uv, *CONSTRAINTS, *packages], cwd=ROOT, env={**os.environ, **settings}
    ).returncode


def main() -> int:
    """Install the packages and return the exit code, which is pip's if pip failed."""
    parser = argparse.ArgumentParser(description="Install the pinned packages.")
    parser.add_argument("--dev", action="store_true", help="what the checks and tests need too")
    server = ".[dev]" if parser.parse_args().dev else "."
    try:
        install(["-e", "clients/python[openai]", "-e", server])
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
