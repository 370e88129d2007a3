"""Old and new together: a client and a server of different revisions of the contract."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.service.basic_cases import check_basic_cases
from tests.service.real_server import ROOT, WAIT_S, demo_server, real_server
from tests.service.revisions import newer_package


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The search path of Python's modules with the newer contract in front."""
    package = newer_package(tmp_path_factory.mktemp("newer"))
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(package), *([before] if before else []), str(ROOT)])


def test_a_client_and_a_server_of_one_revision() -> None:
    check_basic_cases(demo_server().addresses[0])


def test_a_newer_client_and_an_older_server(newer: str) -> None:
    """What it needs and the server lacks is refused by name; what nobody depends on is ignored."""
    address = demo_server().addresses[0]
    done = subprocess.run(
        [sys.executable, "-m", "tests.service.basic_cases", address, "newer"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": newer},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_older_client_and_a_newer_server(newer: str, tmp_path: Path) -> None:
    with real_server("--listen", f"unix:{tmp_path}/s", PYTHONPATH=newer) as server:
        server.wait_until_ready()
        with grpc.insecure_channel(server.addresses[0]) as channel:
            described = ProtoReflectionDescriptorDatabase(channel).FindFileContainingSymbol(
                "headrace.v1.GenerationSpec"
            )
        [spec] = [one for one in described.message_type if one.name == "GenerationSpec"]
        assert "hint" in [field.name for field in spec.field]  # it is the newer one
        check_basic_cases(server.addresses[0])
