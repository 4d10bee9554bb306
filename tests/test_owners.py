"""Whose folders are believed: this user's, root's, and what root outside is seen as."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowtide.files import owners
from lowtide.files.owners import is_trusted

OVERFLOW = 65534
WHOLE = "         0          0 4294967295\n"  # no namespace but the first
ROOTLESS = "0 1000 1\n1 100000 65000\n"


def facts(owner: int, mode: int = 0o755) -> os.stat_result:
    return os.stat_result((0o040000 | mode, 1, 1, 1, owner, owner, 0, 0, 0, 0))


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the files that tell of this process's namespace; here of a rootless one."""
    id_map, overflow = tmp_path / "uid_map", tmp_path / "overflowuid"
    id_map.write_text(ROOTLESS)
    overflow.write_text(f"{OVERFLOW}\n")
    monkeypatch.setattr(owners, "ID_MAP", id_map)
    monkeypatch.setattr(owners, "OVERFLOW_ID", overflow)
    return tmp_path


def test_one_s_own_and_root_s_are(namespace: Path) -> None:
    for text in (WHOLE, ROOTLESS, ""):
        (namespace / "uid_map").write_text(text)
        assert is_trusted(facts(os.getuid())) and is_trusted(facts(0))
        assert not is_trusted(facts(12345))


@pytest.mark.parametrize(
    "mode, is_so", [(0o755, True), (0o700, True), (0o1777, True), (0o775, False), (0o757, False)]
)
def test_root_s_without_a_number_are_unless_others_may_rename(
    namespace: Path, mode: int, is_so: bool
) -> None:
    assert is_trusted(facts(OVERFLOW, mode)) is is_so


@pytest.mark.parametrize(
    "id_map",
    [
        WHOLE,  # nobody is nobody
        "0 0 1\n1000 1000 1\n",  # root has a number, so this is somebody else
        "0 1000 65535\n",  # somebody inside has this number
        "",
        "0 1000\n",
        "0 1000 many\n",
        "0 1000 1 1\n",
    ],
)
def test_others_without_a_number_are_not(namespace: Path, id_map: str) -> None:
    (namespace / "uid_map").write_text(id_map)
    assert not is_trusted(facts(OVERFLOW))


@pytest.mark.parametrize("name", ["uid_map", "overflowuid"])
def test_what_cannot_be_told_is_not(namespace: Path, name: str) -> None:
    (namespace / name).unlink()
    assert not is_trusted(facts(OVERFLOW))
