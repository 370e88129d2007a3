"""Builds the server's package: its kernels for CPUs lie beside the Python sources, where there is a
C++ compiler, and so does the demo model.

    pip install .                                    with kernels if they can be built here
    … -C--build-option=--plat-name=PLATFORM          with all kernels, or it fails
    … -C--build-option=--plat-name=any               without: their sources alone

The library is called by ctypes and knows nothing of Python: one wheel is for all its versions.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
DEMO = "models.demo"


class ServerDistribution(Distribution):
    """A package for one platform, unless it is to have no kernels."""

    @property
    def platform(self) -> str | None:
        """The platform that `--plat-name` names; None: whatever machine this is."""
        return self.get_option_dict("bdist_wheel").get("plat_name", ("", None))[1]

    def has_ext_modules(self) -> bool:
        """Whether there is anything compiled."""
        return self.platform != "any"


class BuildWithKernels(build_py):
    """The usual build, kernels first: they are data files of the package `engine`."""

    def run(self) -> None:
        """Build."""
        native = _native()
        wanted = self.distribution.platform
        if wanted is None:
            native.main(["--optional"])
        elif wanted == "any":
            native.LIBRARY.unlink(missing_ok=True)
        elif lacking := native.build(native.find_compiler()):
            raise native.BuildError(
                f"a package needs kernels for {', '.join(lacking)} too, which this compiler does "
                "not know; g++ 11 or newer knows all"
            )
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """A package's modules; of the demo model's folder the data files alone are wanted."""
        return [] if package == DEMO else super().find_package_modules(package, package_dir)


class ServerWheel(bdist_wheel):
    """A wheel for one platform and every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """The wheel's tag."""
        return "py3", "none", super().get_tag()[2]


def _native() -> ModuleType:
    """`engine.native.build`, without importing `engine`."""
    path = ROOT / "engine" / "native" / "build.py"
    spec = importlib.util.spec_from_file_location("headrace_native_build", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": ServerWheel},
    distclass=ServerDistribution,
)
