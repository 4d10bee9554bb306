"""GGUF files of the hub: named by tag, file or page; planned from their headers, fetched, kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import split, write_gguf
from gguf_oracle import random_model
from hub_stand_in import Fault, StandIn
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.errors import CheckpointError, HubError, UsageError
from lowtide.llm import LLM, plan_model
from lowtide.model_folder import hub, hub_requests
from lowtide.model_folder.gguf_file import choose_gguf, gguf_models, is_gguf, tag_of
from lowtide.model_folder.hub_model import HubModel
from lowtide.model_folder.hub_reference import HubReference, parse

OPTIONS: dict[str, Any] = {"host_memory": "8MiB", "context": 64}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "name-Q8_0.gguf"
    kinds = {True: Type.F32, False: Type.Q8_0}
    choose = lambda name, shape: kinds["norm" in name or "gate_inp" in name]  # noqa: E731
    write_gguf(path, "qwen3_moe", random_model("qwen3_moe", 0), choose)
    return path


@pytest.fixture
def repo(stand_in: StandIn, model_file: Path, tmp_path: Path) -> StandIn:
    """One model whole, one split in a folder of its own, and what accompanies models."""
    split(model_file, tmp_path / "name-UD-Q4_K_XL", 2)
    parts = {f"UD-Q4_K_XL/{p.name}": p.read_bytes() for p in tmp_path.glob("name-UD*")}
    others = {"mmproj-F16.gguf": b"GGUF", "imatrix_x.gguf": b"GGUF", "README.md": b"#"}
    stand_in.add("org/name", {"name-Q8_0.gguf": model_file.read_bytes(), **parts, **others})
    return stand_in


def ids(model: str | Path) -> list[int]:
    with LLM(model, **OPTIONS) as llm:
        return llm.generate([[5, 17, 3]], max_tokens=32)[0].token_ids


@pytest.mark.parametrize(
    "reference",
    [
        "org/name:Q8_0",
        "org/name:q8_0",
        "org/name@main:name-Q8_0.gguf",
        "hf.co/org/name:Q8_0",
        "https://huggingface.co/org/name/blob/main/name-Q8_0.gguf?download=true",
        "org/name",  # one of the usual ones, and there is no checkpoint
    ],
)
def test_a_tag_a_file_or_a_page_names_a_file(
    repo: StandIn, model_file: Path, reference: str
) -> None:
    path = hub.resolve_model(reference)
    assert path.name == "name-Q8_0.gguf" and path.read_bytes() == model_file.read_bytes()
    assert not any(repo.asked(name) for name in ("UD-Q4_K_XL", "README", "mmproj"))


def test_answers_are_those_of_the_local_file(repo: StandIn, model_file: Path) -> None:
    assert ids("org/name:Q8_0") == ids("org/name:UD-Q4_K_XL") == ids(model_file)
    repo.close()
    assert hub.locate_model("org/name:Q8_0") == hub.locate_model("org/name:Q8_0", offline=True)


def test_a_plan_reads_headers_alone(repo: StandIn, model_file: Path, tmp_path: Path) -> None:
    for tag in ("Q8_0", "UD-Q4_K_XL"):
        plan = plan_model(f"org/name:{tag}", **OPTIONS)
        assert plan.minimum_bytes == plan_model(model_file, **OPTIONS).minimum_bytes
    assert not (tmp_path / "cache").exists()


def test_an_interrupted_fetch_goes_on(
    repo: StandIn, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hub.locate_model("org/name:Q8_0")
    assert isinstance(found, HubModel)
    found.model_config({})  # its header is read before anything is fetched
    monkeypatch.setattr(hub_requests, "WAITS_S", ())
    repo.faults.append(Fault("name-Q8_0.gguf", break_after=(1 << 20) + 5000))
    with pytest.raises(HubError, match="could not be fetched"):
        hub.fetch_model(found)
    path = hub.pull("org/name:Q8_0")
    assert path.read_bytes() == model_file.read_bytes()
    ranges = [request.range or "" for request in repo.asked("name-Q8_0.gguf")]
    assert any(part.startswith("bytes=1048576-") for part in ranges)


def test_what_is_here_is_listed_by_tag(repo: StandIn) -> None:
    hub.pull("org/name:UD-Q4_K_XL")
    hub.pull("org/name:Q8_0")
    result = CliRunner().invoke(app, ["ls", "--json"])
    rows = {row["name"]: row for row in json.loads(result.stdout)["models"]}
    assert rows["org/name:Q8_0"]["is_complete"] and rows["org/name:UD-Q4_K_XL"]["is_complete"]
    parts = Path(rows["org/name:UD-Q4_K_XL"]["path"])
    parts.with_name("name-UD-Q4_K_XL-00002-of-00002.gguf").unlink()
    with pytest.raises(HubError, match="Offline, and org/name@main:UD-Q4_K_XL is not whole"):
        hub.locate_model("org/name:UD-Q4_K_XL", offline=True)


@pytest.mark.parametrize(
    ("reference", "error", "said"),
    [
        ("org/name:Q3_K_S", CheckpointError, "Q3_K_S names none of its GGUF models.*Q8_0"),
        ("org/name:mmproj-F16.gguf", CheckpointError, "names none"),
        ("org/name@..:Q8_0", UsageError, "is not a revision"),
    ],
)
def test_a_tag_that_names_nothing(
    repo: StandIn, reference: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        hub.resolve_model(reference)


def test_repositories_of_other_files(stand_in: StandIn, model_file: Path) -> None:
    stand_in.add("org/name", {"a-Q5_0.gguf": b"GGUF", "a-Q6_K.gguf": b"GGUF"})
    with pytest.raises(CheckpointError, match="several GGUF models; .*Tags: Q5_0, Q6_K"):
        hub.resolve_model("org/name")
    with pytest.raises(CheckpointError, match="too few for a GGUF file"):
        hub.resolve_model("org/name:Q5_0")
    stand_in.add("org/name", {"a-Q5_0-00002-of-00003.gguf": b"GGUF"})
    with pytest.raises(CheckpointError, match="files are missing"):
        hub.resolve_model("org/name")
    stand_in.add("org/name", {"config.json": b"{}", "model.safetensors": b""})
    with pytest.raises(HubError, match="no GGUF files that a tag could name"):
        hub.resolve_model("org/name:Q4_0")


@pytest.mark.parametrize(
    "name", ["../x-Q8_0.gguf", "a/../../x-Q8_0.gguf", "/x-Q8_0.gguf", "a\\x-Q8_0.gguf"]
)
def test_names_that_lead_out_of_the_cache(
    stand_in: StandIn, model_file: Path, tmp_path: Path, name: str
) -> None:
    stand_in.add("org/name", {name: model_file.read_bytes()})
    with pytest.raises(HubError, match="the hub lists a file"):
        hub.resolve_model("org/name:Q8_0")
    assert not (tmp_path / "cache").exists()


def test_a_file_is_known_by_its_first_bytes(model_file: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123"
    shutil.copy(model_file, blob)
    assert is_gguf(blob) and ids(blob) == ids(model_file)
    (tmp_path / "text").write_text("GGU")
    assert not is_gguf(tmp_path / "text") and not is_gguf(tmp_path)


def test_references() -> None:
    assert parse("org/name") == HubReference("org/name", "main", None)
    assert parse("https://hf.co/org/na.me/tree/v2") == HubReference("org/na.me", "v2", None)
    assert parse("org/name@v1/x") == HubReference("org/name", "v1/x", None)
    page = "https://huggingface.co/org/name/resolve/main/Q8/x%20y.gguf"
    assert parse(page) == HubReference("org/name", "main", "Q8/x y.gguf")
    for other in ("name", "./org/name", "/org/name", "a/b/c", "C:/x", "hf.co/datasets/org/name"):
        assert parse(other) is None, other


def test_tags() -> None:
    names = ["X-Q4_K_M.gguf", "X-UD-Q4_K_M.gguf", "BF16/X-BF16-00001-of-00002.gguf", "x-f16.gguf"]
    models = gguf_models([*names, "BF16/X-BF16-00002-of-00002.gguf"])
    assert sorted(map(tag_of, models)) == ["BF16", "Q4_K_M", "UD-Q4_K_M", "f16"]
    assert choose_gguf(models, "ud-q4_k_m", "x") == ("X-UD-Q4_K_M.gguf",)
    assert len(choose_gguf(models, "BF16", "x")) == 2
    assert choose_gguf(models, "F16", "x") == ("x-f16.gguf",)
    assert choose_gguf(models, "Q4_K_M", "x") == ("X-Q4_K_M.gguf",)
    models = gguf_models(["X-Q4_K_M.gguf", "Y-Q4_K_M.gguf"])
    with pytest.raises(CheckpointError, match="Q4_K_M may be X-Q4_K_M.gguf, Y-Q4_K_M.gguf"):
        choose_gguf(models, "Q4_K_M", "x")
