"""Builds the kernels for CPUs beside the Python sources, where there is a C++ compiler."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py


class BuildWithKernels(build_py):
    """The usual build, kernels first: they are data files of the package `engine`."""

    def run(self) -> None:
        """Build."""
        path = Path(__file__).parent / "engine" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("headrace_native_build", path)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main(["--optional"])
        super().run()


class PlatformDistribution(Distribution):
    """A wheel with kernels in it is for one platform."""

    def has_ext_modules(self) -> bool:
        """Whether there is anything compiled."""
        return True


setup(cmdclass={"build_py": BuildWithKernels}, distclass=PlatformDistribution)
