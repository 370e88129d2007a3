"""The C++ example of a session against a real server, with an engine whose output is known. It is
built by `make test-clients`, which takes minutes the first time.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clients.go_ts.programs import REPOSITORY, running_server

BUILT = REPOSITORY / ".tools" / "cpp"
PROGRAM = BUILT / "session"
needs_it = pytest.mark.skipif(not PROGRAM.exists(), reason="not built: make test-clients does it")

PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(mine LANGUAGES CXX)
find_package(headrace CONFIG REQUIRED)
add_executable(mine mine.cc)
target_link_libraries(mine PRIVATE headrace::session)
"""
PROGRAM_OF_PROJECT = """
#include <google/rpc/status.pb.h>

#include <iostream>

#include "headrace/session.h"

int main() {
  headrace::v1::GenerationSpec spec;
  spec.set_request_id("a");
  auto channel = grpc::CreateChannel("unix:/nowhere", grpc::InsecureChannelCredentials());
  headrace::example::Session session(channel);
  std::cout << spec.ShortDebugString() << google::rpc::Status().code();
}
"""


@needs_it
def test_the_example_prints_each_text() -> None:
    with running_server("service_server") as server:
        done = subprocess.run(
            [str(PROGRAM), server.unix, "abcd", "river"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        # The engine says the prompt again, from its second byte on.
        assert done.stdout == f"prompt-1:{'bcda' * 8}\nprompt-2:{('iverr' * 7)[:32]}\n"


@needs_it
@pytest.mark.timeout(300)
def test_a_project_finds_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "mine.cc").write_text(PROGRAM_OF_PROJECT)
    prefix, build = tmp_path / "prefix", tmp_path / "build"
    for command in (
        ("cmake", "--install", str(BUILT), "--prefix", str(prefix)),
        ("cmake", "-S", str(tmp_path), "-B", str(build), f"-DCMAKE_PREFIX_PATH={prefix}"),
        ("cmake", "--build", str(build)),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    said = subprocess.run([str(build / "mine")], capture_output=True, text=True, check=True).stdout
    assert said == 'request_id: "a"0'
