"""A plan's requests to the hub: config, file list and headers, whatever goes wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hub_repos import published_repo, whole_repo
from hub_stand_in import COMMIT, Content, Fault, StandIn, be_patient
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.errors import CheckpointError, ConfigError, HubError
from lowtide.llm import plan_model
from lowtide.model_folder import hub, hub_requests
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_folder.hub_model import HubModel
from lowtide.model_folder.hub_reference import HubReference

SHARD = "model.safetensors"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("family", "num_shards", "total_bytes", "most_bytes"),
    [
        ("llada2", 7, 32.5e9, 2_500_000),
        ("qwen3_moe", 13, 61.1e9, 3_000_000),
        ("deepseek_v3", 7, 31.9e9, 1_000_000),
        ("glm4_moe_lite", 12, 59.9e9, 2_000_000),
        ("minimax_m2", 47, 230e9, 14_000_000),  # in FP8
        ("lfm2_moe", 4, 16.7e9, 1_000_000),
    ],
)
def test_a_plan_reads_headers_alone(
    stand_in: StandIn,
    tmp_path: Path,
    family: str,
    num_shards: int,
    total_bytes: float,
    most_bytes: int,
) -> None:
    repo = stand_in.add("org/name", published_repo(family))
    shards = {n: c for n, c in repo.files.items() if n.endswith(".safetensors")}
    assert len(shards) == num_shards
    assert abs(sum(content.num_bytes for content in shards.values()) - total_bytes) < 10**9
    result = run("plan", "org/name", "--host-memory", "12GiB", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["budget_bytes"] == 12 << 30
    assert stand_in.sent_bytes < most_bytes
    names = {request.path.rpartition("/")[2] for request in stand_in.asked("/resolve/")}
    assert names == {"config.json", *shards}
    for name, content in shards.items():
        length = int.from_bytes(content.start[:8], "little")
        ranges = [request.range for request in stand_in.asked(name) if request.is_elsewhere]
        assert ranges == ["bytes=0-7", f"bytes=8-{7 + length}"]
    assert not (tmp_path / "cache").exists()


def test_a_plan_from_headers_is_the_plan_of_the_files(stand_in: StandIn) -> None:
    files = whole_repo()
    stand_in.add("org/name", files)
    options: dict[str, Any] = {"host_memory": "8MiB", "context": 128}
    by_headers = plan_model("org/name", **options)
    assert not stand_in.asked("forward")
    assert by_headers == plan_model(hub.resolve_model("org/name"), **options)


def test_entries_are_those_of_the_files(stand_in: StandIn) -> None:
    files = {name: data for name, data in whole_repo().items() if name != "forward.safetensors"}
    stand_in.add("org/name", files)
    found = HubModel.ask(HubReference("org/name")).checkpoint()
    assert found.tensors == Checkpoint.open(hub.resolve_model("org/name")).tensors


def test_shards_with_names_of_their_own_are_found_by_the_index(stand_in: StandIn) -> None:
    files = whole_repo()
    files["part.safetensors"] = files.pop("model.safetensors")
    del files["forward.safetensors"]
    with pytest.raises(CheckpointError, match="org/name@main holds neither .*part.safetensors"):
        stand_in.add("org/name", files)
        plan_model("org/name", context=128)
    index = {"weight_map": {"lm_head.weight": "part.safetensors"}}
    stand_in.add("org/name", {**files, "model.safetensors.index.json": json.dumps(index).encode()})
    assert plan_model("org/name", context=128).num_experts
    index["weight_map"]["x"] = "gone.safetensors"
    stand_in.add("org/name", {**files, "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(CheckpointError, match="names gone.safetensors, which is missing"):
        plan_model("org/name", context=128)


def test_a_shard_that_is_not_there(stand_in: StandIn) -> None:
    files = whole_repo()
    files["model-00002-of-00003.safetensors"] = files.pop(SHARD)
    stand_in.add("org/name", files)
    with pytest.raises(CheckpointError, match="holds 1 of 3 shards; number 1 is missing"):
        plan_model("org/name")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff" * 8, "announces a header of 18446744073709551615 bytes"),
        (b"\x40" + bytes(7) + b"{", "is not valid JSON"),
        (b"\x02" + bytes(7) + b"{}", "belong to no tensor"),
        (b"abc", "has 3 bytes, too few"),
    ],
)
def test_damaged_headers(stand_in: StandIn, header: bytes, message: str) -> None:
    files = whole_repo()
    files[SHARD] = Content(header, 3 if len(header) == 3 else 1000)
    stand_in.add("org/name", files)
    with pytest.raises(CheckpointError, match=f"model.safetensors.*{message}"):
        plan_model("org/name")


def test_a_config_that_is_refused_is_all_that_is_fetched(stand_in: StandIn) -> None:
    files = whole_repo()
    files["config.json"] = b'{"architectures": ["FooForCausalLM"]}'
    stand_in.add("org/name", files)
    for verb in (["plan"], ["generate", "-p", "x"], ["pull"], ["chat"]):
        result = run(*verb, "org/name")
        assert result.exit_code == 2 and "FooForCausalLM" in result.stderr, result.output
    assert {request.path.rpartition("/")[2] for request in stand_in.asked("/resolve/")} == {
        "config.json"
    }
    files["config.json"] = Content(b"{", 17 << 20)
    stand_in.add("org/name", files)
    with pytest.raises(ConfigError, match="config.json has 17825792 bytes; at most 16777216"):
        plan_model("org/name")


def test_other_formats_are_named(stand_in: StandIn) -> None:
    stand_in.add("org/name", {"config.json": b"{}", "pytorch_model.bin": b""})
    with pytest.raises(HubError, match="PyTorch's pickled weights instead"):
        plan_model("org/name")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("", 9, 401, {"X-Error-Code": "RepoNotFound"}), "no such model, or it is private"),
        (Fault("", 9, 401), "HF_TOKEN"),
        (Fault("", 9, 403, {"X-Error-Code": "GatedRepo"}), "gives access on request"),
        (Fault("", 9, 403), r"forbids it \(403\)"),
        (Fault("", 9, 404, {"X-Error-Code": "RevisionNotFound"}), "not this revision"),
        (Fault("", 9, 404), r"\(404\); check the id and HF_ENDPOINT"),
        (Fault("", 9, 429, {"Retry-After": "300"}), r"\(429\); try again in 300 s"),
        (Fault("", 9, 429, {"RateLimit": '"api";r=0;t=99'}), "try again in 99 s"),
        (Fault("", 9, 429), "try again later"),
        (Fault("", 9, 500), "500.*Check the network"),
        (Fault("", 9, pause_s=5), "Timeout.*Check the network.*`offline`"),
    ],
)
@pytest.mark.parametrize("part", ["/api/models", "config.json", SHARD])
def test_failures_are_typed(
    stand_in: StandIn, part: str, fault: Fault, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.pause_s:
        be_patient(0.5, monkeypatch)
    stand_in.add("org/name", whole_repo())
    fault = Fault(part, fault.times, fault.status, fault.headers, pause_s=fault.pause_s)
    stand_in.faults.append(fault)
    with pytest.raises(HubError, match=f"org/name@main.* could not be fetched.*{message}"):
        plan_model("org/name")
    assert 0 < 9 - fault.times <= 3


@pytest.mark.parametrize("part", ["/api/models", "config.json", SHARD])
def test_the_body_of_a_refusal_is_not_read(stand_in: StandIn, part: str) -> None:
    """It has no bound, and what is told of it stands in its head."""
    stand_in.add("org/name", whole_repo())
    stand_in.faults.append(Fault(part, 9, 403, claims_bytes=1 << 40))
    with pytest.raises(HubError, match=r"forbids it \(403\)"):
        plan_model("org/name")


def test_a_repository_of_40_000_files(stand_in: StandIn) -> None:
    stand_in.add("org/name", whole_repo())
    of_file = {"size": 1 << 30, "blobId": "0" * 40, "lfs": {"sha256": "0" * 64, "size": 1 << 30}}
    more = [{"rfilename": f"data/{'x' * 250}-{i}.bin", **of_file} for i in range(40_000)]
    stand_in.change_listing = lambda answer: answer["siblings"].extend(more)
    assert plan_model("org/name", context=128).num_experts
    assert stand_in.sent_bytes > 16 << 20


@pytest.mark.parametrize(
    "fault",
    [
        Fault(SHARD, 2, 503),
        Fault(SHARD, 2, 429, {"Retry-After": "0"}),
        Fault(SHARD, 2, break_after=100),
        Fault(SHARD, 2, break_after=0),
        Fault(SHARD, 2, pause_s=5),
        Fault(SHARD, 2, shifts_range=True),
        Fault(SHARD, 2, ignores_range=True),
        Fault("config.json", 2, 503),
        Fault("/api/models", 2, 503),
    ],
)
def test_what_passes_is_waited_for(
    stand_in: StandIn, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.pause_s:
        be_patient(2.0, monkeypatch)
    stand_in.add("org/name", whole_repo())
    stand_in.faults.append(fault)
    assert plan_model("org/name", context=128).num_experts
    assert fault.times == 0


def test_a_server_without_ranges_sends_no_more_than_is_needed(stand_in: StandIn) -> None:
    stand_in.add("org/name", whole_repo())
    stand_in.faults.append(Fault("safetensors", 99, ignores_range=True, break_after=1 << 20))
    plan_model("org/name", context=128)


def test_the_token_goes_to_the_hub_alone(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.add("org/name", whole_repo())
    stand_in.needed_token = "secret"
    with pytest.raises(HubError, match="HF_TOKEN"):
        plan_model("org/name")
    monkeypatch.setenv("HF_TOKEN", "secret")
    stand_in.requests.clear()
    plan_model("org/name", context=128)
    for request in stand_in.requests:
        assert request.token == (None if request.is_elsewhere else "Bearer secret")


def test_revisions(stand_in: StandIn) -> None:
    repo = stand_in.add("org/name", whole_repo())
    repo.commits["v2"] = other = "f" * 40
    repo.commits[other] = other
    assert plan_model("org/name@v2", context=128) == plan_model("org/name", context=128)
    assert {r.path.split("/")[4] for r in stand_in.asked("/resolve/")} == {COMMIT, other}
    with pytest.raises(HubError, match="not this revision"):
        plan_model("org/name@gone")


def test_a_whole_copy_works_without_the_hub(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.add("org/name", whole_repo())
    folder = hub.resolve_model("org/name")
    num_requests = len(stand_in.requests)
    assert hub.resolve_model("org/name") == folder  # asks whether there is a newer one
    assert len(stand_in.requests) == num_requests + 1
    caplog.clear()
    stand_in.faults.append(Fault("/api/", 99, 429, {"Retry-After": "999"}))
    assert hub.resolve_model("org/name") == folder
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "org/name@main: the hub cannot be asked" in record.getMessage()
    assert "the whole copy that is here is used" in record.getMessage()
    stand_in.close()
    assert plan_model("org/name", context=128).num_experts
    result = run("plan", "org/name", "--context", "128")
    assert result.exit_code == 0 and "the hub cannot be asked (ConnectError" in result.stderr
    (folder / "model.safetensors").unlink()
    with pytest.raises(HubError, match="could not be fetched"):
        hub.resolve_model("org/name")


def test_waits_end_when_a_fetch_is_stopped(stand_in: StandIn) -> None:
    from threading import Event

    stopped = Event()
    stopped.set()
    stand_in.add("org/name", whole_repo())
    stand_in.faults.append(Fault("config.json", 99, 503))
    url = HubModel.ask(HubReference("org/name")).url("config.json")
    with pytest.raises(hub_requests.Stopped):
        list(hub_requests.file_part(url, 0, 10, stopped))
