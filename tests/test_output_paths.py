"""One rule for what a verb is told to write: its folder is made, and a place where nothing can be
written is refused before the work."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from oracle import GOLDENS
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.errors import StorageError
from lowtide.files.whole_file import check_writable, whole_file

MODEL = str(GOLDENS / "llada-moe-a")
ASKED = {
    "plan": (MODEL, "--context", "32", "--plot"),
    "generate": (MODEL, "--prompt-ids", "5", "--context", "32", "--trace"),
    "pack": (MODEL, "--format", "q8", "--out"),
    "synth": ("olmoe", "--out"),
}


def run(verb: str, path: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [verb, *ASKED[verb], str(path), *more])
    return result.exit_code, result.stderr


@pytest.mark.parametrize("verb", ASKED)
def test_the_folder_is_made(verb: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "deeper" / "it.svg"
    assert run(verb, path)[0] == 0
    assert path.exists()


@pytest.mark.parametrize("verb", ["plan", "generate"])
def test_what_cannot_be_written_is_refused_before_the_work(verb: str, tmp_path: Path) -> None:
    """A budget that nothing fits into would be refused by the plan."""
    (tmp_path / "file").touch()
    code, said = run(verb, tmp_path / "file" / "it.svg", "--host-memory", "1KiB")
    assert code == 1 and "it.svg cannot be written" in said and "budget" not in said


def test_checking_leaves_nothing_but_the_folder(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "it", "trace")
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(StorageError, match="it is a folder"):
        check_writable(tmp_path / "new", "trace")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_a_pipe_or_device_is_written_through_not_replaced_by_a_file(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    """/dev/null would be a file from then on, of every program."""
    path = tmp_path / "it"
    make(path)
    kind, heard = path.lstat().st_mode, []
    reader = threading.Thread(target=lambda: heard.append(path.read_bytes()))
    check_writable(path, "trace")
    reader.start()
    with whole_file(path, "trace") as file:
        file.write(b"first")
        file.seek(0)
        file.write(b"F")
    reader.join()
    assert heard == [b"First" if stat.S_ISFIFO(kind) else b""]
    assert path.lstat().st_mode == kind and list(tmp_path.iterdir()) == [path]


def test_a_full_device_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match="/dev/full cannot be written: No space left"),
        whole_file(Path("/dev/full"), "trace") as file,
    ):
        file.write(b"first")


THROUGH = """
import sys
from pathlib import Path
from lowtide.files.whole_file import check_writable, whole_file
print("before")
check_writable(Path(sys.argv[1]), "trace")
with whole_file(Path(sys.argv[1]), "trace") as file:
    file.write(b"it\\n")
print("after")
"""


def test_standard_output_is_written_through(tmp_path: Path) -> None:
    """A file that it goes to would else be another one from then on, without what was printed."""
    path, command = tmp_path / "out", [sys.executable, "-c", THROUGH, "/dev/stdout"]
    with open(path, "wb") as file:
        subprocess.run(command, stdout=file, check=True)
    assert path.read_text() == "before\nit\nafter\n"
    assert subprocess.run(command, capture_output=True, check=True).stdout == path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_text("first")
    with pytest.raises(RuntimeError), whole_file(path, "trace") as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_link_to_itself_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.symlink_to(path)
    with pytest.raises(StorageError, match="it cannot be written: Too many levels"):
        check_writable(path, "trace")
    with pytest.raises(StorageError, match="Too many levels"), whole_file(path, "trace"):
        pytest.fail("nothing is to be written")
    assert path.is_symlink() and list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """What it leads to is written, be it there already or not, and the link stays."""
    path, target = tmp_path / "link", tmp_path / "elsewhere" / "it"
    target.parent.mkdir()
    path.symlink_to(target)
    for text in (b"first", b"second"):
        check_writable(path, "trace")
        with whole_file(path, "trace") as file:
            file.write(text)
        assert path.is_symlink() and target.read_bytes() == text
    assert list(target.parent.iterdir()) == [target]
