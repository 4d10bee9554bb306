"""The parts that kernels are compiled in: which a model asks for, and what is kept of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import write_gguf
from gguf_oracle import random_model
from packed_matrices import BLOCKS, SECTIONED, matrix_of, name_of, unit_of

from lowtide import SamplingParams
from lowtide.errors import UnsupportedError
from lowtide.formats import MatrixFormat
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.cpu import library
from lowtide.kernels.cpu.building import kept_libraries
from lowtide.kernels.cpu.compiler import find_compiler
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.packed import PackedOperators, parts_of
from lowtide.kernels.cpu.sources import KERNELS_FOLDER, Part, all_parts, part, with_needed
from lowtide.llm import LLM

SOURCES = {
    "answer.cpp": '#include "parts.hpp"\nextern "C" int answer() { return one() + two(); }\n',
    "one.cpp": '#include "parts.hpp"\nint one() { return 40; }\n',
    "two.cpp": '#include "parts.hpp"\nint two() { return 2; }\n',
}
PROGRAM = """
import ctypes, sys
from pathlib import Path
from lowtide.cli.interrupts import install_signal_handlers
from lowtide.kernels.cpu.building import kept_libraries
from lowtide.kernels.cpu.sources import Part
install_signal_handlers()
folder = Path(sys.argv[1])
try: [path] = kept_libraries([Part("both", tuple(sorted(folder.glob("*.cpp"))), folder)])
except KeyboardInterrupt: sys.exit(130)
print(ctypes.CDLL(str(path)).answer())
"""
COMPILER = """#!/bin/sh
for each; do
    case $each in *.cpp)
        name=$(basename "$each")
        echo "$name" >> {log}
        if test -e {held}/"$name"; then
            rm {held}/"$name"
            echo $$ > {held}/begins
            mv {held}/begins {held}/begun
            sleep 60 &
            wait
        fi
    esac
done
exec {real} "$@"
"""


class Workshop(NamedTuple):
    """A part's sources, an empty cache, and a compiler that notes what it compiles."""

    folder: Path
    log: Path
    held: Path  # with a file of a source's name: its next compilation does not end
    environment: dict[str, str]

    @property
    def part(self) -> Part:
        return Part("both", tuple(sorted(self.folder.glob("*.cpp"))), self.folder)

    @property
    def compiled(self) -> list[str]:
        return sorted(self.log.read_text().split()) if self.log.exists() else []

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, str(self.folder)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    try:
        real = find_compiler()
    except UnsupportedError as error:
        pytest.skip(str(error))
    folder, tools, held = (tmp_path / name for name in ("source", "tools", "held"))
    for each in (folder, tools, held):
        each.mkdir()
    for name, content in SOURCES.items():
        (folder / name).write_text(content)
    (folder / "parts.hpp").write_text("int one();\nint two();\n")
    log = tmp_path / "log"
    (tools / "c++").write_text(COMPILER.format(log=log, held=held, real=real))
    (tools / "c++").chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", os.pathsep.join([str(tools), os.environ["PATH"]]))
    return Workshop(folder, log, held, dict(os.environ))


def test_two_starts_at_once_compile_each_file_once(workshop: Workshop) -> None:
    starts = [workshop.start() for _ in range(3)]
    outputs = [start.communicate(timeout=240) for start in starts]
    assert [out for out, _ in outputs] == ["42\n"] * 3, outputs
    assert workshop.compiled == sorted(SOURCES)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_who_is_stopped_loses_only_what_was_being_compiled(
    workshop: Workshop, number: signal.Signals
) -> None:
    """Also where the compiler goes on: whoever was killed holds nobody up."""
    (workshop.held / "two.cpp").touch()
    kept = Path(workshop.environment["XDG_CACHE_HOME"]) / "lowtide" / "kernels"
    stopped, begun = workshop.start(), workshop.held / "begun"
    while not begun.exists() or len([*kept.glob("*.o")]) < 2:
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.01)
    stopped.send_signal(number)
    stopped.communicate(timeout=60)
    assert stopped.returncode not in (0, 1)
    try:
        output, errors = workshop.start().communicate(timeout=240)
        assert output == "42\n", errors
    finally:
        with suppress(ProcessLookupError):
            os.killpg(int(begun.read_text()), signal.SIGKILL)
    assert workshop.compiled == sorted([*SOURCES, "two.cpp"])


def test_only_what_has_changed_is_compiled_again(workshop: Workshop) -> None:
    [first] = kept_libraries([workshop.part])
    workshop.log.unlink()
    (workshop.folder / "one.cpp").write_text(SOURCES["one.cpp"].replace("40", "41"))
    [second] = kept_libraries([workshop.part])
    assert workshop.compiled == ["one.cpp"] and first.exists() and second != first
    workshop.log.unlink()
    (workshop.folder / "parts.hpp").write_text("int one();\nint two();\n\n")
    kept_libraries([workshop.part])
    assert workshop.compiled == sorted(SOURCES)


@pytest.mark.parametrize("damage", [lambda c: b"", lambda c: c[:-1], lambda c: b"?" + c[1:]])
def test_an_object_that_is_not_whole_is_compiled_again(
    workshop: Workshop, damage: Callable[[bytes], bytes]
) -> None:
    [path] = kept_libraries([workshop.part])
    content = path.read_bytes()
    path.unlink()
    [one] = path.parent.glob("one-*.o")
    one.write_bytes(damage(one.read_bytes()))
    workshop.log.unlink()
    assert kept_libraries([workshop.part]) == [path]
    assert workshop.compiled == ["one.cpp"] and len(path.read_bytes()) == len(content)


def test_progress_counts_files_and_says_how_long(workshop: Workshop) -> None:
    told: list[tuple[str, int, int]] = []
    kept_libraries([workshop.part], lambda *line: told.append(line))
    counts = [done for _, done, _ in told]
    assert counts == sorted(counts) and counts[-1] == 3
    for line, done, total in told:
        assert total == 3 and line.startswith(f"compiling kernels: {done} of 3, about ")
    told.clear()
    kept_libraries([workshop.part], lambda *line: told.append(line))
    assert told == []


# Which parts


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun."""
    if shutil.which("c++") is None:
        pytest.skip("nothing can be compiled here")
    monkeypatch.setattr(library, "loaded", {})


def test_every_source_is_of_one_part() -> None:
    sources = [path for name in all_parts() for path in part(name).sources]
    assert sorted(sources) == sorted(KERNELS_FOLDER.rglob("*.cpp"))
    assert all(part(name).sources for name in all_parts())
    assert with_needed(["rounded/q4", "core"]) == ["core", "rounded", "rounded/q4"]
    assert with_needed(all_parts()) == all_parts()


@pytest.mark.parametrize("rounds_rows", [False, True])
@pytest.mark.parametrize("stored", [*BLOCKS, *SECTIONED], ids=name_of)
def test_a_format_s_own_parts_are_all_that_it_is_computed_with(
    nothing_loaded: None, stored: MatrixFormat, rounds_rows: bool
) -> None:
    torch.manual_seed(0)
    rounded = frozenset((stored.name,) * rounds_rows)
    asked = parts_of([stored], rounded)
    kernels = choose_kernels("auto", torch.bfloat16, rounded=rounded, formats=[stored])
    assert {*library.loaded} == {*with_needed(asked), "core"}
    matrix = matrix_of(stored, (16, 2 * max(unit_of(stored), 128)))
    for num_rows in (1, 17, 40):
        x = torch.randn(num_rows, matrix.shape[1]).bfloat16()
        out = torch.empty(num_rows, 16).bfloat16()
        kernels.multiply_by(x, matrix, out)
    kernels.unpack(matrix, torch.empty(*matrix.shape).bfloat16())
    kernels.several_experts([stored] * 3)
    assert {*library.loaded} == {*with_needed(asked), "core"}


@pytest.mark.parametrize("rounds_rows", [False, True])
def test_a_type_that_nobody_asked_for_is_loaded_or_an_error(
    nothing_loaded: None, monkeypatch: pytest.MonkeyPatch, rounds_rows: bool
) -> None:
    matrix = matrix_of(BLOCKS[-1], (4, 512))
    operators = PackedOperators(load_kernels(), rounds_rows=rounds_rows)
    assert {*library.loaded} == {"core"}
    assert operators.matrix_call(matrix) is not None
    assert f"{'rounded' if rounds_rows else 'packed'}/{BLOCKS[-1].name}" in library.loaded

    def fail(*_: object) -> None:
        raise UnsupportedError("The compiler has gone.")

    monkeypatch.setattr("lowtide.kernels.cpu.packed.load_parts", fail)
    monkeypatch.setattr(library, "loaded", {"core": load_kernels()})
    again = PackedOperators(load_kernels(), rounds_rows=rounds_rows)
    with pytest.raises(UnsupportedError, match="has gone"):
        again.matrix_call(matrix)


TYPES = (Type.Q4_K, Type.Q6_K, Type.Q8_0, Type.IQ2_XS, Type.MXFP4)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    kinds = iter(TYPES * 99)
    write_gguf(path, "qwen3_moe", random_model("qwen3_moe", 0), lambda *_: next(kinds))
    return path


@pytest.mark.parametrize("activations", ["own", "int8"])
@pytest.mark.parametrize("model", ["demo:autoregressive", "demo:diffusion", "a GGUF file"])
def test_no_part_is_loaded_once_a_model_is_open(
    nothing_loaded: None, gguf_file: Path, model: str, activations: str
) -> None:
    is_demo = model.startswith("demo:")
    reference: str | Path = model if is_demo else gguf_file
    options = {"format": "q4"} if is_demo else {}
    with LLM(reference, context=256, activations=activations, dtype="bfloat16", **options) as llm:
        loaded = {*library.loaded}
        assert len(loaded) > 3
        for length in (1, 40):
            llm.generate([[5] * length], SamplingParams(max_tokens=3), progress=False)
        assert {*library.loaded} == loaded


def test_weights_in_bfloat16_need_the_core_alone(nothing_loaded: None) -> None:
    with LLM("demo:autoregressive", context=256) as llm:
        llm.generate("47 + 85", SamplingParams(max_tokens=3), progress=False)
        assert {*library.loaded} == {"core"}
