"""Kernels compile for other processors and by older compilers than this machine has."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from lowtide.errors import UnsupportedError
from lowtide.kernels.cpu.compiler import find_compiler
from lowtide.kernels.cpu.sources import KERNELS_FOLDER, all_parts, part

SOURCES = [path for name in all_parts() for path in part(name).sources]
FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-pthread", f"-I{KERNELS_FOLDER}")

OLDER = 10
"""A version, as sources ask for it, without dot products of bfloat16, as g++ 9 is, too."""

every_source = pytest.mark.parametrize(
    "source", SOURCES, ids=[str(path.relative_to(KERNELS_FOLDER)) for path in SOURCES]
)


def check(command: Sequence[str], **environment: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def zig_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("ziglang")
    return str(tmp_path_factory.mktemp("zig"))


@every_source
def test_it_compiles_for_aarch64(source: Path, zig_cache: str, tmp_path: Path) -> None:
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    command = [*compiler, *FLAGS, "-c", str(source), "-o", str(tmp_path / "made.o")]
    check(command, ZIG_LOCAL_CACHE_DIR=zig_cache, ZIG_GLOBAL_CACHE_DIR=zig_cache)
    assert (tmp_path / "made.o").stat().st_size > 0


@every_source
def test_it_compiles_without_what_older_compilers_lack(source: Path) -> None:
    try:
        compiler = find_compiler()
    except UnsupportedError as error:
        pytest.skip(str(error))
    if "clang" in subprocess.check_output([compiler, "--version"], text=True):
        macros = ["-U__clang_major__", f"-D__clang_major__={OLDER}"]
    else:
        macros = ["-U__GNUC__", f"-D__GNUC__={OLDER}"]
    check([compiler, *macros, *FLAGS, "-fsyntax-only", str(source)])


ANSWERS = ("best_variant", "best_int8", "best_own", "has_avx_vnni")
FLAGS_OF_VARIANTS = (
    {"avx2", "fma", "f16c"},
    {"avx512f", "avx512bw"},
    {"avx512_bf16"},
    {"amx_tile", "amx_bf16"},
)
"""What Linux calls what each variant needs, from AVX2 on."""


def answers(command: Sequence[str], path: Path, **environment: str) -> list[int]:
    source = KERNELS_FOLDER / "dense" / "processor.cpp"
    check([*command, *FLAGS, "-shared", str(source), "-o", str(path)], **environment)
    library = ctypes.CDLL(str(path))
    return [library[f"lowtide_{name}"]() for name in ANSWERS]


def test_the_processor_itself_is_asked_whoever_compiled(zig_cache: str, tmp_path: Path) -> None:
    """A compiler's own table of it is empty in what another toolchain has linked."""
    machine = platform.machine()
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.2.28"]
    caches = {"ZIG_LOCAL_CACHE_DIR": zig_cache, "ZIG_GLOBAL_CACHE_DIR": zig_cache}
    found = answers(zig, tmp_path / "zig.so", **caches)
    if machine == "x86_64":
        facts = Path("/proc/cpuinfo").read_text()
        flags = set(next(line for line in facts.splitlines() if line.startswith("flags")).split())
        needed = itertools.accumulate(FLAGS_OF_VARIANTS, set.union)
        assert found[0] == sum(each <= flags for each in needed)
    else:
        assert found == [0, 0, 0, 0]
    with suppress(UnsupportedError):
        assert answers([find_compiler()], tmp_path / "system.so") == found
