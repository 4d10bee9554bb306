"""References to folders, demos and the hub, on a fake cache and without a network."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from lowtide.errors import HubError, UsageError
from lowtide.model_folder import hub
from lowtide.model_folder.tokenizer import Tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
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
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub that must not be asked."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the hub was asked")

    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    monkeypatch.setattr(hub, "DEMO_FOLDER", tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    return folder


def snapshot(cache: Path, commit: str = COMMIT, name: str = "org--name") -> Path:
    return cache / f"models--{name}" / "snapshots" / commit


class FakeHub:
    """A hub that serves one complete or incomplete model and writes down what it is asked."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch, without: str = "") -> None:
        self.cache, self.without = cache, without
        self.calls: list[dict[str, Any]] = []
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repo_id: str, *, revision: str) -> SimpleNamespace:
        self.calls.append({"asked": revision})
        return SimpleNamespace(sha=COMMIT)

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.calls.append(options)
        name = repo_id.replace("/", "--")
        return str(fill(snapshot(self.cache, name=name), without=self.without))


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model(str(tmp_path)) == tmp_path


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        hub.resolve_model(str(tmp_path / "m.safetensors"))


@pytest.mark.parametrize("reference", ["./gone", "/no/such/folder", "~/gone", "gone", "a/b/c", ""])
def test_a_path_that_does_not_exist_says_what_was_tried(reference: str) -> None:
    if reference == "":
        assert hub.resolve_model(reference) == Path()
        return
    with pytest.raises(HubError, match=r"Tried: the folder .*demo:diffusion"):
        hub.resolve_model(reference)


def test_the_demos_are_where_they_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in hub.DEMO_NAMES:
        folder = hub.resolve_model(f"demo:{name}", offline=True)
        tokenizer = Tokenizer.load(folder)  # the one that they share
        assert tokenizer is not None and tokenizer.eos_token_ids == (0,)
        monkeypatch.chdir(folder.parent)
        assert Tokenizer.load(Path(name)) is not None
    assert [model.name for model in hub.list_models()][:2] == ["demo:diffusion", "demo:chat"]


def test_demo_models(tmp_path: Path) -> None:
    folder = fill(tmp_path / "demo" / "diffusion")
    assert hub.resolve_model("demo:diffusion") == folder
    with pytest.raises(HubError, match="demo:diffusion, demo:chat"):
        hub.resolve_model("demo:../x")
    with pytest.raises(HubError, match=r"not whole.*config\.json"):
        hub.resolve_model("demo:chat")


def test_a_demo_without_a_shard_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "demo" / "diffusion", without=SHARDS[1])
    with pytest.raises(HubError, match=SHARDS[1]):
        hub.resolve_model("demo:diffusion")


def test_every_file_comes_from_one_commit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(cache, monkeypatch)
    assert hub.resolve_model("org/name@v2") == snapshot(cache)
    asked, download = fake.calls
    assert asked == {"asked": "v2"}
    assert download["revision"] == COMMIT
    assert set(download["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja"}
    assert download["ignore_patterns"] == ["*/*"]
    assert (cache / "models--org--name" / "refs" / "v2").read_text() == COMMIT
    assert hub.resolve_model("org/name@v2", offline=True) == snapshot(cache)
    assert len(fake.calls) == 2


def test_a_commit_that_is_here_needs_no_network(cache: Path) -> None:
    fill(snapshot(cache))
    assert hub.resolve_model(f"org/name@{COMMIT}") == snapshot(cache)


def test_a_partial_commit_is_completed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(snapshot(cache), without=SHARDS[0])
    fake = FakeHub(cache, monkeypatch)
    assert hub.resolve_model(f"org/name@{COMMIT}") == snapshot(cache)
    assert [call.get("revision") for call in fake.calls] == [COMMIT]


def test_a_model_that_is_not_whole_on_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(cache, monkeypatch, without=SHARDS[0])
    with pytest.raises(HubError, match=f"{SHARDS[0]} missing"):
        hub.resolve_model("org/name")


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

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(HubError, match="could not be fetched.*Check the network.*--offline"):
        hub.resolve_model("org/name")


@pytest.mark.parametrize("kind", ["GatedRepoError", "RepositoryNotFoundError"])
def test_errors_of_the_hub_are_explained(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import huggingface_hub.errors

    error_type = getattr(huggingface_hub.errors, kind)

    def fail(*args: object, **kwargs: object) -> None:
        raise error_type.__new__(error_type)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(HubError, match="HF_TOKEN"):
        hub.resolve_model("org/name")


@pytest.mark.parametrize("revision", ["", "../x", "a b", "-x", "a/../../b", "/etc"])
def test_revisions_that_cannot_be(revision: str) -> None:
    with pytest.raises(UsageError, match="not a revision"):
        hub.resolve_model(f"org/name@{revision}")


def test_pull_is_for_the_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for reference in (str(tmp_path), "demo:chat"):
        with pytest.raises(UsageError, match="on this machine already"):
            hub.pull(reference)
    FakeHub(cache, monkeypatch)
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
