"""Machines that lack something, for tests of facts that no machine may change.

These tests run once more on each (`make test-machines`). A process becomes such a machine before it
imports anything of lowtide, and stays it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable

_COMPILERS = ("c++", "g++", "clang++")
_HUGE_PAGE_ADVICE = (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE)
_NUM_CORES = 16


def make_machine(name: str) -> list[str]:
    """Takes away what the machine `name` lacks, "" for nothing.

    Returns the warnings that its users get, as pytest's `filterwarnings` has them: in all other
    tests they are errors.
    """
    return MACHINES[name]() if name else []


def _no_direct_reads() -> list[str]:
    """A file system such as an older tmpfs."""
    open_file = os.open

    def refusing(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return open_file(path, flags, *arguments, **options)

    os.open = refusing
    return ["ignore:.*has no direct reads"]


class _SmallPages(mmap.mmap):
    def madvise(self, option: int, *span: int) -> None:
        if option in _HUGE_PAGE_ADVICE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().madvise(option, *span)


def _no_huge_pages() -> list[str]:
    """A kernel built without transparent huge pages."""
    mmap.mmap = _SmallPages
    return []


def _no_compiler() -> list[str]:
    which = shutil.which
    shutil.which = lambda name, *rest, **options: (
        None if name in _COMPILERS else which(name, *rest, **options)
    )
    return []


def _reference_kernels() -> list[str]:
    """As if every model were opened with `kernels="reference"`."""
    from lowtide.kernels import choice

    choose = choice.choose_kernels
    choice.choose_kernels = lambda option, *rest, **named: choose("reference", *rest, **named)
    return []


def _older_processor(variant: str) -> Callable[[], list[str]]:
    """One whose best compiled kernels are those of `variant`, if not of less."""

    def make() -> list[str]:
        from lowtide.kernels.cpu import variants

        own = variants.num_variants
        limit = variants.VARIANTS.index(variant) + 1
        variants.num_variants = lambda library: min(own(library), limit)
        return []

    return make


def _many_cores() -> list[str]:
    """More than a token has experts, so that an expert has several; this machine's are shared."""
    os.sched_getaffinity = lambda process: set(range(_NUM_CORES))
    return []


MACHINES: dict[str, Callable[[], list[str]]] = {
    "no-direct-reads": _no_direct_reads,
    "no-huge-pages": _no_huge_pages,
    "no-compiler": _no_compiler,
    "reference-kernels": _reference_kernels,
    "kernels-avx512-bf16": _older_processor("AVX512-BF16"),
    "kernels-avx512": _older_processor("AVX-512"),
    "kernels-avx2": _older_processor("AVX2"),
    "kernels-portable": _older_processor("portable"),
    "many-cores": _many_cores,
}
