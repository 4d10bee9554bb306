"""Whose folders are believed: this user's, root's, and the system's own of an unnumbered root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowtide.files import owners
from lowtide.files.owners import SYSTEM_FOLDERS, is_own, is_trusted

OVERFLOW = 65534
WHOLE = "         0          0 4294967295\n"  # no namespace but the first
ROOTLESS = "0 1000 1\n1 100000 65000\n"
CHOSEN = Path("/data/me")


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
        assert is_own(facts(os.getuid())) and is_trusted(CHOSEN, facts(os.getuid()))
        assert is_trusted(CHOSEN, facts(0))
        assert not is_own(facts(12345)) and not is_trusted(CHOSEN, facts(12345))


@pytest.mark.parametrize(
    "mode, is_so", [(0o755, True), (0o700, True), (0o1777, True), (0o775, False), (0o757, False)]
)
def test_the_system_s_folders_are_root_s_unless_others_may_rename(
    namespace: Path, mode: int, is_so: bool
) -> None:
    for folder in SYSTEM_FOLDERS:
        assert is_trusted(folder, facts(OVERFLOW, mode)) is is_so


@pytest.mark.parametrize(
    "folder", ["/data", "/home/other", "/tmp/other", "/home/../data", "tmp", "/var/tmp/a/b"]
)
def test_what_a_user_may_have_made_is_not(namespace: Path, folder: str) -> None:
    assert not is_trusted(Path(folder), facts(OVERFLOW, 0o700))


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
    assert not is_trusted(Path("/"), facts(OVERFLOW))


@pytest.mark.parametrize("name", ["uid_map", "overflowuid"])
def test_what_cannot_be_told_is_not(namespace: Path, name: str) -> None:
    (namespace / name).unlink()
    assert not is_trusted(Path("/"), facts(OVERFLOW))


@pytest.mark.parametrize("id_map", ["", ROOTLESS, "0 1000 65536\n", "0 1000\n", None])
def test_who_is_seen_as_everybody_has_nothing_of_their_own(
    namespace: Path, monkeypatch: pytest.MonkeyPatch, id_map: str | None
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: OVERFLOW)
    path = namespace / "uid_map"
    path.unlink() if id_map is None else path.write_text(id_map)
    assert not is_own(facts(OVERFLOW)) and not is_trusted(CHOSEN, facts(OVERFLOW))


def test_nobody_has_where_all_users_have_numbers(
    namespace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: OVERFLOW)
    (namespace / "uid_map").write_text(WHOLE)
    assert is_own(facts(OVERFLOW)) and is_trusted(CHOSEN, facts(OVERFLOW))
