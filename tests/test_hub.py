"""References to folders, demos and the hub, on a fake cache and without a network."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_repos import GOLDEN
from hub_stand_in import COMMIT, Content, StandIn
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from lowtide.errors import CheckpointError, HubError, UsageError
from lowtide.model_folder import hub, hub_model
from lowtide.model_folder.tokenizer import Tokenizer

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def fill(folder: Path, *, without: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    for name in ("config.json", "tokenizer.json", *SHARDS):
        if name != without:
            (folder / name).write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> Path:
    """An empty hub cache, and a hub without models that nobody has to ask."""
    monkeypatch.setattr(hub, "DEMO_FOLDER", tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def snapshot(cache: Path, commit: str = COMMIT, name: str = "org--name") -> Path:
    return cache / f"models--{name}" / "snapshots" / commit


def repo(*, without: str = "") -> dict[str, bytes | Content]:
    """A model whose shards are no shards: only names are looked at."""
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    files: dict[str, bytes | Content] = {"model.safetensors.index.json": json.dumps(index).encode()}
    files |= {"config.json": (GOLDEN / "config.json").read_bytes(), "tokenizer.json": b"{}"}
    files |= {name: name.encode() for name in SHARDS}
    return {name: data for name, data in files.items() if name != without}


@pytest.mark.parametrize("reference", ["./gone", "/no/such/folder", "~/gone", "a/b/c"])
def test_a_path_that_does_not_exist_is_a_missing_file(reference: str) -> None:
    with pytest.raises(HubError, match="There is no file"):
        hub.resolve_model(reference)


def test_a_name_that_is_nothing_says_what_was_tried() -> None:
    with pytest.raises(HubError, match=r"Tried: the folder .*demo:diffusion"):
        hub.resolve_model("gone")


def test_a_page_that_is_no_model_s_is_answered_with_what_ids_look_like() -> None:
    with pytest.raises(HubError, match="There is no model.*org/name:Q4_K_M"):
        hub.resolve_model("https://huggingface.co/datasets/org/name")


@pytest.mark.parametrize("verb", [hub.resolve_model, hub.pull])
def test_what_no_path_can_be_is_refused_in_words(verb: Callable[[str], Path]) -> None:
    for reference, said in (
        ("Why is the sky blue? " * 40, "first comes the model, then the text"),
        ("a\0b", "null"),
        ("~nobody-has-this-name/x", "home"),
    ):
        with pytest.raises(UsageError, match=said) as error:
            verb(reference)
        assert len(str(error.value)) < 300


def test_a_folder_that_must_not_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root may look into all, refusals are made here."""
    folder = tmp_path / "closed"
    folder.mkdir()

    def refuse(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for name in ("stat", "iterdir"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            with pytest.raises(CheckpointError, match="closed cannot be read: Permission denied"):
                hub.resolve_model(str(folder))


def test_a_hub_id_below_a_folder_that_must_not_be_searched(
    monkeypatch: pytest.MonkeyPatch, stand_in: StandIn
) -> None:
    """Nobody can tell whether there is such a folder: the hub is not asked, and how to is told."""

    def refuse(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    said = {}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)
        for reference in ("org/name", "org/name@v2", "/closed/name"):
            with pytest.raises(CheckpointError, match="name.* cannot be read: Perm") as error:
                hub.resolve_model(reference)
            said[reference] = "on the hub start in another folder" in str(error.value)
    assert list(said.values()) == [True, True, False] and not stand_in.requests


def test_the_demos_are_where_they_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in hub.DEMO_NAMES:
        folder = hub.resolve_model(f"demo:{name}", offline=True)
        tokenizer = Tokenizer.load(folder)
        assert tokenizer is not None and tokenizer.eos_token_ids == (2,)
        monkeypatch.chdir(folder.parent)
        assert Tokenizer.load(Path(name)) is not None
    assert [model.name for model in hub.list_models()][:2] == [
        "demo:diffusion",
        "demo:autoregressive",
    ]
    assert hub.resolve_model("demo:chat") == hub.resolve_model("demo:autoregressive")


def test_demo_models(tmp_path: Path) -> None:
    folder = fill(tmp_path / "demo" / "diffusion")
    assert hub.resolve_model("demo:diffusion") == folder
    with pytest.raises(HubError, match="demo:diffusion, demo:autoregressive"):
        hub.resolve_model("demo:../x")
    with pytest.raises(HubError, match=r"not whole.*config\.json"):
        hub.resolve_model("demo:chat")
    (folder / SHARDS[1]).unlink()
    with pytest.raises(HubError, match=SHARDS[1]):
        hub.resolve_model("demo:diffusion")


def test_every_file_comes_from_one_commit(cache: Path, stand_in: StandIn) -> None:
    stand_in.add("org/name", repo()).commits["v2"] = COMMIT
    assert hub.resolve_model("org/name@v2") == snapshot(cache)
    by_name = [r.path for r in stand_in.requests if "v2" in r.path]
    assert by_name == ["/api/models/org/name/revision/v2"]
    assert [
        r.path for r in stand_in.asked("/org/name/")[1:] if not (r.is_elsewhere or COMMIT in r.path)
    ] == []
    assert (cache / "models--org--name" / "refs" / "v2").read_text() == COMMIT
    num_requests = len(stand_in.requests)
    assert hub.resolve_model("org/name@v2", offline=True) == snapshot(cache)
    assert len(stand_in.requests) == num_requests


def test_a_commit_that_is_here_needs_no_network(cache: Path, stand_in: StandIn) -> None:
    fill(snapshot(cache))
    assert hub.resolve_model(f"org/name@{COMMIT}") == snapshot(cache)
    assert not stand_in.requests


@pytest.mark.parametrize("name", [SHARDS[0], "tokenizer.json", "config.json"])
def test_a_partial_commit_is_completed(cache: Path, stand_in: StandIn, name: str) -> None:
    stand_in.add("org/name", repo())
    (hub.resolve_model("org/name") / name).unlink()
    stand_in.requests.clear()
    assert (hub.resolve_model("org/name") / name).exists()
    assert not [r for r in stand_in.requests if r.is_elsewhere]  # its bytes are still here
    for blob in (cache / "models--org--name" / "blobs").iterdir():
        blob.unlink()
    (hub.resolve_model(f"org/name@{COMMIT}") / SHARDS[1]).read_bytes()


def test_a_model_that_is_not_whole_on_the_hub(cache: Path, stand_in: StandIn) -> None:
    stand_in.add("org/name", repo(without=SHARDS[0]))
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}, which is missing"):
        hub.resolve_model("org/name")
    assert not cache.exists()


@pytest.mark.parametrize("by_environment", [False, True])
def test_offline(cache: Path, monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by_environment)
    with pytest.raises(HubError, match="Offline.*everything missing.*lowtide pull org/name@main"):
        hub.resolve_model("org/name", offline=not by_environment)
    fill(snapshot(cache), without=SHARDS[1])
    refs = cache / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    with pytest.raises(HubError, match=SHARDS[1]):
        hub.resolve_model("org/name", offline=not by_environment)
    fill(snapshot(cache))
    assert hub.resolve_model("org/name", offline=not by_environment) == snapshot(cache)


def test_a_damaged_reference_in_the_cache(cache: Path) -> None:
    fill(snapshot(cache))
    refs = cache / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("../../elsewhere")
    with pytest.raises(HubError, match="everything missing"):
        hub.resolve_model("org/name", offline=True)


@pytest.mark.parametrize("error", [ConnectionError("no route"), LocalEntryNotFoundError("none")])
def test_a_network_that_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(hub_model, "answer_to", fail)
    with pytest.raises(HubError, match="could not be fetched.*Check the network.*`offline`"):
        hub.resolve_model("org/name")


@pytest.mark.parametrize("revision", ["", "../x", "a b", "-x", "a/../../b", "/etc"])
def test_revisions_that_cannot_be(revision: str) -> None:
    with pytest.raises(UsageError, match="not a revision"):
        hub.resolve_model(f"org/name@{revision}")


def test_pull_is_for_the_hub(cache: Path, tmp_path: Path, stand_in: StandIn) -> None:
    for reference in (str(tmp_path), "demo:chat"):
        with pytest.raises(UsageError, match="on this machine already"):
            hub.pull(reference)
    stand_in.add("org/name", repo())
    assert hub.pull("org/name") == snapshot(cache)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    (fill(tmp_path / "m") / "model.safetensors.index.json").write_text(index)
    with pytest.raises(HubError):
        hub.missing_files(tmp_path / "m")


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    fill(tmp_path / "m")
    (tmp_path / "x.safetensors").write_text("")
    index = {"weight_map": {"a": "../x.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hub.missing_files(tmp_path / "m") == ["../x.safetensors"]


def test_a_link_to_nothing_is_missing(tmp_path: Path) -> None:
    fill(tmp_path / "m", without=SHARDS[0])
    (tmp_path / "m" / SHARDS[0]).symlink_to(tmp_path / "gone")
    assert hub.missing_files(tmp_path / "m") == [SHARDS[0]]


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hub.missing_files(tmp_path) == ["*.safetensors"]
    (tmp_path / "model.safetensors").write_text("")
    assert hub.missing_files(tmp_path) == []


def test_a_copy_is_whole_where_it_can_be_opened(tmp_path: Path) -> None:
    """By the single file, else the index, else the numbers of shards."""
    fill(tmp_path, without=SHARDS[0])
    (tmp_path / "model.safetensors").write_text("")
    assert hub.missing_files(tmp_path) == []
    (tmp_path / "model.safetensors").unlink()
    assert hub.missing_files(tmp_path) == [SHARDS[0]]
    (tmp_path / "model.safetensors.index.json").unlink()
    assert hub.missing_files(tmp_path) == ["*.safetensors"]
    (tmp_path / SHARDS[0]).write_text("{}")
    assert hub.missing_files(tmp_path) == []


def test_what_an_index_names_beside_numbered_shards_is_fetched(
    cache: Path, stand_in: StandIn
) -> None:
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": "model_mtp.safetensors"}}
    named = {"model.safetensors.index.json": json.dumps(index).encode()}
    stand_in.add("org/name", {**repo(), **named, "model_mtp.safetensors": b"more"})
    assert (hub.pull("org/name") / "model_mtp.safetensors").read_bytes() == b"more"


def test_list_models(cache: Path, tmp_path: Path) -> None:
    assert hub.list_models() == []
    fill(tmp_path / "demo" / "diffusion")
    fill(snapshot(cache, name="b--two--three"))
    fill(snapshot(cache, name="a--one"), without=SHARDS[0])
    (snapshot(cache, name="c--empty")).mkdir(parents=True)
    found = hub.list_models()
    assert [m.name for m in found] == ["demo:diffusion", "a/one", "b/two--three"]
    assert [m.is_complete for m in found] == [True, False, True]
    assert [m.revision for m in found] == ["", COMMIT, COMMIT]
    assert found[2].num_bytes == sum(p.stat().st_size for p in found[2].path.iterdir())


def test_a_cache_that_must_not_be_read_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As root may look into all, refusals are made here."""
    folder, stat = fill(snapshot(cache)), Path.stat

    def refuse(path: Path, **options: Any) -> Any:
        if path.parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(HubError, match="cache cannot be read: .* denied. HF_HOME names another"):
        hub.resolve_model(f"org/name@{COMMIT}", offline=True)
    assert hub.list_models() == []
    assert f"{folder}/config.json is left out: Permission denied." in caplog.text
