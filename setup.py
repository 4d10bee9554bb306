"""Wheels with the compiled kernels inside; without a compiler, wheels that compile at first use.

All else is in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).parent / "src"
sys.path.insert(0, str(SOURCE))

from lowtide.errors import UnsupportedError  # noqa: E402
from lowtide.kernels.cpu.compiler import find_compiler  # noqa: E402
from lowtide.kernels.cpu.library import build_kernels  # noqa: E402


def _can_compile() -> bool:
    try:
        find_compiler()
    except UnsupportedError:
        return False
    return True


class BuildWithKernels(build_py):
    """Compiles the kernels beside the package's files; an editable install compiles its own."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and _can_compile():
            build_kernels(Path(self.build_lib) / "lowtide")


class PlatformDistribution(Distribution):
    """Of this platform where there are compiled kernels inside."""

    def has_ext_modules(self) -> bool:
        return _can_compile()


class AnyPythonWheel(bdist_wheel):
    """For every Python 3: the kernels know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": AnyPythonWheel},
)
