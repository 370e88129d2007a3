"""The Python client's package and the bundle of protos, as their users get them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.clients.go_ts.programs import REPOSITORY, running_server

# Packages are downloaded.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path, folder: Path = REPOSITORY, **environment: str) -> str:
    """What a command printed, which must succeed."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(one) for one in command],
        cwd=folder,
        env={**outside, **environment},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_quick_start_from_the_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    run("scripts/packages-python.sh", sys.executable, tmp_path)
    [wheel], [source] = tmp_path.glob("headrace-*.whl"), tmp_path.glob("headrace-*.tar.gz")
    with zipfile.ZipFile(wheel) as inside:
        names = inside.namelist()
    assert {"headrace/py.typed", "headrace/v1/generation_pb2.pyi"} < set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(source) as archive:
        assert any(name.endswith("/src/headrace/client.py") for name in archive.getnames())
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", fresh)
    constraints = REPOSITORY / "constraints.txt"
    run(fresh / "bin/python", "-m", "pip", "install", "--quiet", "-c", constraints, wheel)
    readme = (REPOSITORY / "clients" / "python" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"## One request\n\n```python\n(.*?)```", readme, flags=re.DOTALL)
    assert found is not None
    with running_server("service_server") as addresses:
        target = {"HEADRACE_TARGET": addresses.tcp}
        told = run(fresh / "bin/python", "-c", found[1], folder=fresh, **target)
        said = run(
            fresh / "bin/headrace", "generate", "ab", "--max-tokens", "4", folder=fresh, **target
        )
    assert re.search(r"length 32$", told.strip(), re.IGNORECASE)
    assert said.strip()


def test_the_bundle_of_protos_is_all_that_a_generator_needs(tmp_path: Path) -> None:
    buf = Path(sys.executable).parent / "buf"
    run("scripts/packages-protos.sh", buf, tmp_path)
    [bundle] = tmp_path.glob("headrace-protos-*.tar.gz")
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    [root] = (tmp_path / "out").iterdir()
    assert (root / "headrace.binpb").stat().st_size > 10_000
    assert len(list(root.glob("headrace/v1/*.proto"))) >= 4
    # The protos that they import are there too.
    run(buf, "build", root, "-o", tmp_path / "again.binpb", folder=tmp_path)
