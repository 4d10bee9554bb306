"""A drive that stops answering: the request fails with the file's name, and others are answered.

A model can still be closed, and a program can end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from inside import loop_of
from whole import LIMIT_S, PythonTransfer, Setting

from lowtide import SamplingParams
from lowtide.engine.running.engine import Engine
from lowtide.errors import StorageError, UsageError
from lowtide.experts import compiled_residents, host_tier, transfer
from lowtide.model_writing.synth import synth
from lowtide.reading import file_reader

PROMPT, PARAMS = [5, 17, 3], SamplingParams(max_tokens=24)
LEAST = Setting("lru", 0.0)


class Drive:
    """That of the experts: it answers, or does not until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.is_asked = threading.Event()
        self.has_given_up = False
        preadv = os.preadv

        def late_preadv(*arguments: object) -> int:
            if not self.answers.is_set():
                self.is_asked.set()
            if not self.answers.wait(LIMIT_S):
                self.has_given_up = True
            return preadv(*arguments)

        monkeypatch.setattr(os, "preadv", late_preadv)
        # Compiled reads are tests/test_compiled_reader.py's.
        monkeypatch.setattr("lowtide.engine.running.experts.DiskTransfer", PythonTransfer)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    drive = Drive(monkeypatch)
    yield drive
    drive.answers.set()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("endless") / "model", seed=5)


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_model_whose_read_never_ends_is_closed(
    model: Path, drive: Drive, is_watched: bool
) -> None:
    """In the midst of a pass: in one compiled call, and layer by layer."""
    llm = LEAST.open(model)
    if is_watched:
        llm.observer = lambda *_: None
    drive.answers.clear()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate(PROMPT, PARAMS)
        except BaseException as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert drive.is_asked.wait(LIMIT_S)
    llm.close()
    assert not drive.has_given_up
    asking.join(LIMIT_S)
    assert len(errors) == 1 and isinstance(errors[0], UsageError), errors
    assert "closed" in str(errors[0])


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_read_that_never_ends_is_told_with_its_file(
    model: Path, drive: Drive, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LEAST.open(model) as llm:
        expected = llm.generate(PROMPT, PARAMS)[0].token_ids
    with LEAST.open(model) as llm:
        if is_watched:
            llm.observer = lambda *_: None
        drive.answers.clear()
        with monkeypatch.context() as patch:
            for module in (file_reader, host_tier, compiled_residents):
                patch.setattr(module, "WAIT_LIMIT_S", 0.5)
            said = r"expert \d+ .*\.safetensors has not ended within"
            with pytest.raises(StorageError, match=said):
                llm.generate(PROMPT, PARAMS)
        drive.answers.set()
        assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected


PROGRAM = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[2])
from whole import Setting, reads_in_python
from lowtide import SamplingParams
with reads_in_python():
    llm = Setting("lru", 0.0).open(sys.argv[1])
is_asked = threading.Event()
def preadv(*arguments):
    is_asked.set()
    time.sleep(1000)
os.preadv = preadv
threading.Thread(target=llm.generate, args=([5, 17, 3],), daemon=True).start()
is_asked.wait()
llm.close()
print("closed")
"""


def test_a_program_ends_whose_read_does_not(model: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and result.stdout == "closed\n"


def test_a_compiled_read_is_answered_when_nothing_writes_to_its_slot_any_more(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: the slot is another expert's then."""
    answers = threading.Event()

    def look(engine: Engine) -> None:
        host = engine.experts.host
        compiled, slot = host.transfer.compiled, host.ledger.take()
        assert compiled is not None
        wait_for = compiled.readiness.wait

        def stalled(slot: int, limit_s: float) -> int | None:
            return wait_for(slot, limit_s) if answers.wait(0.01) else None

        with monkeypatch.context() as patch:
            patch.setattr(transfer, "WAIT_LIMIT_S", 0.05)
            patch.setattr(compiled.readiness, "wait", stalled)
            ticket = host.transfer.start(0, 0, slot)
            assert wait([ticket], 0.5).not_done
            answers.set()
            assert ticket.result(LIMIT_S) == compiled.num_bytes(0)
        host.ledger.drop(slot)

    with LEAST.open(model) as llm:
        loop_of(llm).run(look)
