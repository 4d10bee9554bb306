"""A child process that is asked in lines: large ones, late ones, one that reads nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lowtide.child_process import ChildError, ChildProcess

ECHO = """
import json, sys
for line in sys.stdin.buffer:
    asked = json.loads(line)
    print(json.dumps({"text": asked["text"] * asked["times"]}), flush=True)
"""
DEAF = """
import time
time.sleep(600)
"""
MUTE = """
import sys, time
for line in sys.stdin.buffer:
    time.sleep(600)
"""


@contextmanager
def child_of(script: str, folder: Path) -> Iterator[ChildProcess]:
    path = folder / "child.py"
    path.write_text(script)
    child = ChildProcess(path)
    yield child
    child.close()


@pytest.mark.parametrize("num_chars", [0, 1, 4095, 65536, 3 << 20])
def test_questions_and_answers_of_any_length(num_chars: int, tmp_path: Path) -> None:
    with child_of(ECHO, tmp_path) as child:
        for times in (0, 1, 2):
            answer = child.ask({"text": "x" * num_chars, "times": times}, 60.0)
            assert answer == {"text": "x" * num_chars * times}


@pytest.mark.parametrize("script", [DEAF, MUTE])
@pytest.mark.parametrize("num_chars", [1, 3 << 20])
def test_a_child_that_is_late_is_ended_at_its_limit(
    script: str, num_chars: int, tmp_path: Path
) -> None:
    with child_of(script, tmp_path) as child:
        child.start()
        start_s = time.monotonic()
        with pytest.raises(ChildError) as raised:
            child.ask({"text": "x" * num_chars}, 0.3)
        assert raised.value.late_s == 0.3
        assert 0.3 <= time.monotonic() - start_s < 30


def test_a_child_that_ends_with_a_question_unread_is_told_of(tmp_path: Path) -> None:
    with child_of("import sys; sys.exit('no more')", tmp_path) as child:
        with pytest.raises(ChildError, match="no more") as raised:
            child.ask({"text": "x" * (3 << 20)}, 60.0)
        assert raised.value.late_s is None
