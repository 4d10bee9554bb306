"""Wheels: for a named platform, for this machine, or for any.

`--plat-name` says which, an option of setuptools' own (`python -m build -C--build-option=...`):

    manylinux_2_28_x86_64   for systems with that glibc or a newer one: compiled by this system's
                            compiler, if it is one of the oldest of them, else by zig
    any                     without kernels; they are compiled at first use
    linux_x86_64, or none    by this system's compiler, if there is one, for this system

All else is in pyproject.toml; `make wheel` (tools/wheels.py) makes what is published.
"""

import platform
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).parent / "src"
sys.path.insert(0, str(SOURCE))

from lowtide.errors import UnsupportedError  # noqa: E402
from lowtide.kernels.cpu.compiler import find_compiler, zig_for  # noqa: E402
from lowtide.kernels.cpu.library import build_kernels, built_folder  # noqa: E402

_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")


class Toolchain(NamedTuple):
    """Command that compiles, and the machine that runs what it compiled."""

    command: list[str]
    machine: str


def _toolchain(platform_name: str) -> Toolchain | None:
    """Return what compiles for a platform; None: the wheel has no kernels."""
    if platform_name == "any":
        return None
    if found := _MANYLINUX.fullmatch(platform_name):
        major, minor, machine = found.groups()
        oldest = platform.libc_ver()[1] == f"{major}.{minor}"
        if oldest and machine == platform.machine():  # as in manylinux' image
            return Toolchain([find_compiler()], machine)
        return Toolchain(zig_for(machine, f"{major}.{minor}"), machine)
    if platform_name not in ("", f"linux_{platform.machine()}"):
        raise UnsupportedError(f"No kernels can be compiled for {platform_name}.")
    try:
        return Toolchain([find_compiler()], platform.machine())
    except UnsupportedError:
        return None


class KernelsDistribution(Distribution):
    """Of one platform if there are compiled kernels inside."""

    def toolchain(self) -> Toolchain | None:
        _, name = self.get_option_dict("bdist_wheel").get("plat_name", ("", ""))
        return _toolchain(name)

    def has_ext_modules(self) -> bool:
        return self.toolchain() is not None


class BuildWithKernels(build_py):
    """Compiles the kernels beside the package's files; an editable install compiles its own."""

    def run(self) -> None:
        super().run()
        package = Path(self.build_lib) / "lowtide"
        # An earlier build of another platform may have left its own.
        shutil.rmtree(built_folder(package), ignore_errors=True)
        toolchain = self.distribution.toolchain()
        if toolchain is not None and not self.editable_mode:
            build_kernels(package, *toolchain)


class AnyPythonWheel(bdist_wheel):
    """For every Python 3: the kernels know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    distclass=KernelsDistribution,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": AnyPythonWheel},
)
