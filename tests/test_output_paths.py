"""One rule for the files that a verb is told to write.

Its folder is made, files that lowtide did not write stay, and a place where nothing can be written
is refused before the work.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from matplotlib.figure import Figure
from oracle import GOLDENS
from test_calibrate import make_calibration
from typer.testing import CliRunner

import lowtide
from lowtide.cli.app import app
from lowtide.cli.plotting import save_figure
from lowtide.cli.turns import Turns
from lowtide.errors import StorageError
from lowtide.files.whole_file import check_writable, whole_file
from lowtide.lab import machine_profile
from lowtide.replay.trace import is_trace

MODEL = str(GOLDENS / "llada-moe-a")
ASKED = {
    "plan": (MODEL, "--context", "32", "--plot"),
    "generate": (MODEL, "--prompt-ids", "5", "--context", "32", "--trace"),
    "pack": (MODEL, "--format", "q8", "--out"),
    "calibrate": ("demo:autoregressive", "--out"),
    "quality": ("demo:autoregressive", "--plot"),
    "synth": ("olmoe", "--out"),
}


def run(verb: str, path: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [verb, *ASKED[verb], str(path), *more])
    return result.exit_code, result.stderr


@pytest.mark.parametrize("verb", ["plan", "generate", "pack", "synth"])
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
    check_writable(tmp_path / "new" / "it", "trace", is_trace)
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(StorageError, match="it is a folder"):
        check_writable(tmp_path / "new", "trace", is_trace)


# what is there already


def write_plot(path: Path) -> None:
    save_figure(Figure(), path)


def write_profile(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        text = "# Measured by lowtide bench: experts of m, 2026-01-01.\nname = 'm'\n"
        patch.setattr(machine_profile, "profile_text", lambda _: text)
        machine_profile.save_profile(cast(Any, None), path)


def write_conversation(path: Path) -> None:
    turns = Turns(True)
    turns.add("one", "two")
    turns.save(path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "conversation.json": write_conversation,
    "trace": lambda path: make_calibration().trace.save(path),
    "calibration": lambda path: make_calibration().save(path),
    "profile.toml": write_profile,
    "plot.svg": write_plot,
    "plot.png": write_plot,
    "plot.pdf": write_plot,
}
"""By a name that each takes, what writes where a user says."""

FOREIGN = (
    b"my precious notes",
    b"\x00",
    b"{}",
    b'{"messages": [], "mine": 1}',
    b'{"messages": 5}',
    b"# a profile of mine\n",
    b"PK\x03\x04 no archive",
    b"\x89PNG\r\n\x1a\n",
    b"<svg></svg>",
)


@pytest.mark.parametrize("name", WRITERS)
def test_what_lowtide_wrote_is_replaced_and_all_else_stays(name: str, tmp_path: Path) -> None:
    path, write = tmp_path / name, WRITERS[name]
    path.touch()  # as mktemp does
    write(path)
    write(path)
    own = path.read_bytes()
    assert own
    for make in (WRITERS[other] for other in WRITERS if other[:4] != name[:4]):
        other = tmp_path / "other.svg"
        make(other)
        check_stays(path, other.read_bytes(), write)
        other.unlink()
    for content in (*FOREIGN, b"x" + own[:9]):
        check_stays(path, content, write)


def check_stays(path: Path, content: bytes, write: Callable[[Path], None]) -> None:
    path.write_bytes(content)
    with pytest.raises(StorageError, match="so it stays: choose another name, or remove it"):
        write(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("verb", ["plan", "generate", "calibrate", "quality"])
def test_a_file_of_the_user_is_refused_before_the_work(verb: str, tmp_path: Path) -> None:
    """A budget that nothing fits into would be refused by the plan."""
    path, text = tmp_path / "notes.svg", tmp_path / "text"
    path.write_text("my precious notes")
    text.write_text("a text")
    of_text = ["--text", str(text)] if verb in ("calibrate", "quality") else []
    code, said = run(verb, path, "--host-memory", "1KiB", *of_text)
    assert code == 1 and "so it stays" in said and "budget" not in said
    assert path.read_text() == "my precious notes"


def test_every_file_at_a_users_path_is_written_under_the_rule() -> None:
    """Modules that write without the check write into lowtide's own folders, or into one they made.

    The check asks if lowtide wrote the file that is there.
    """
    root, own = (
        Path(lowtide.__file__).parent,
        {"model_writing/pack.py", "model_writing/synth.py", "hardware/store.py"},
    )
    asked = re.compile(r"whole_file\(([^()]|\([^()]*\))*\)")
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name in own or name == "files/whole_file.py":
            continue
        for call in asked.finditer(path.read_text()):
            assert call[0].count(",") == 2, f"{name} {call[0]}"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_a_pipe_or_device_is_written_through_not_replaced_by_a_file(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    """/dev/null would be a file from then on, of every program."""
    path = tmp_path / "it"
    make(path)
    kind, heard = path.lstat().st_mode, []
    reader = threading.Thread(target=lambda: heard.append(path.read_bytes()))
    check_writable(path, "trace", is_trace)
    reader.start()
    with whole_file(path, "trace", is_trace) as file:
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
check_writable(Path(sys.argv[1]), "trace", lambda file: False)
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
        check_writable(path, "trace", is_trace)
    with pytest.raises(StorageError, match="Too many levels"), whole_file(path, "trace"):
        pytest.fail("nothing is to be written")
    assert path.is_symlink() and list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """The link's target is written, be it there already or not, and the link stays."""
    path, target = tmp_path / "link", tmp_path / "elsewhere" / "it"
    target.parent.mkdir()
    path.symlink_to(target)
    for text in (b"first", b"second"):
        check_writable(path, "trace", lambda file: True)
        with whole_file(path, "trace") as file:
            file.write(text)
        assert path.is_symlink() and target.read_bytes() == text
    assert list(target.parent.iterdir()) == [target]
