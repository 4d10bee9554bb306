"""`python -m lowtide.kernels.check`: each variant of the kernels beside the plain one."""

from __future__ import annotations

import re
from array import array

import pytest
from programs import python

from lowtide.errors import UnsupportedError
from lowtide.kernels import check
from lowtide.kernels.cpu.compiler import find_compiler
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.variants import INT8_VARIANTS, VARIANTS, WITHOUT_DOTS, num_variants

WITHOUT_LIBRARIES = """
import runpy, sys
sys.modules.update(torch=None, numpy=None)
runpy.run_module("lowtide.kernels.check", run_name="__main__")
"""
LINE = re.compile(r"^(int8 rows, )?(.+?) +([0-9a-f]{16})$", re.MULTILINE)


@pytest.mark.slow
def test_all_variants_of_this_processor_are_right_without_torch() -> None:
    try:
        find_compiler()
    except UnsupportedError as error:
        pytest.skip(str(error))
    done = python("-c", WITHOUT_LIBRARIES, timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr
    found = LINE.findall(done.stdout)
    exact = {name: digest for rounded, name, digest in found if not rounded}
    int8 = {name: digest for rounded, name, digest in found if rounded}
    library = load_kernels()
    assert [*exact] == list(VARIANTS[: num_variants(library)])
    assert [*int8] == list(INT8_VARIANTS[: library.lowtide_best_int8() + 1])
    assert len({exact[name] for name in VARIANTS[: WITHOUT_DOTS + 1] if name in exact}) == 1
    assert len(set(int8.values())) == 1
    assert done.stdout.endswith("all is as it should be\n")


def numbers(*values: int) -> array[int]:
    return array("H", values)


def faults_of(*cases: check.Case) -> list[str]:
    return check.check("", VARIANTS[:3], 1, cases)


def test_one_bit_that_differs_is_found_and_named() -> None:
    case = check.Case("norm", lambda variant: numbers(0x3F80, 0x3F80 + (variant == 2)))
    [fault] = faults_of(case)
    assert fault == "AVX-512: norm has other bits than the plain one's"
    same = check.Case("norm", lambda variant: numbers(0x3F80))
    assert faults_of(same) == []


@pytest.mark.parametrize(("place", "is_found"), [(1, True), (2, False)])
def test_a_sum_of_dots_may_differ_by_little(place: int, is_found: bool) -> None:
    """From the variant on whose instructions round otherwise, and by a 64th at most."""
    near = check.Case("sum", lambda v: numbers(0x3F80 + (v == place), 0x4080), sums_dots=True)
    assert bool(faults_of(near)) == is_found
    far = check.Case("sum", lambda v: numbers(0x3F80 + 0x20 * (v == 2), 0x3F80), sums_dots=True)
    assert faults_of(far) == ["AVX-512: sum is far from the plain one's"]


def test_the_plain_one_is_held_against_python() -> None:
    known = [check.Known(0, 1.0, 0.01), check.Known(1, 2.0, 0.01)]
    wrong = check.Case("sum", lambda variant: numbers(0x3F80, 0x3F80), known=known)
    assert faults_of(wrong) == ["portable: sum is 1 at 1, and Python says 2"]
    not_a_number = check.Case("sum", lambda variant: numbers(0x7FC0), known=known[:1])
    assert len(faults_of(not_a_number)) == 1
