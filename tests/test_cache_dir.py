"""`cache_dir` with whole models: a restart goes on with the bits that memory would have had."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inside import loop_of
from test_conversations import BLOCK_LENGTH, FAMILIES, params
from test_toy_family import CONFIG, FAMILY
from typer.testing import CliRunner

from lowtide import LLM
from lowtide.cli.app import app
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.facts import RunOptions
from lowtide.engine.running.engine import Engine
from lowtide.errors import UsageError
from lowtide.families import SynthSize, register, unregister
from lowtide.llm import plan_model
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_writing.synth import synth, write_checkpoint
from lowtide.reading.fingerprint import fingerprint

DENSE = "dense"
PROMPT = [(7 * i + i // 9) % 90 for i in range(120)]
OPTIONS: dict[str, Any] = {"context": 512, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Plain keys, latent ones, windows, blocks; and a model without experts."""
    folder = tmp_path_factory.mktemp("models")
    found = {family: synth(family, "tiny", folder / family, seed=5) for family in FAMILIES}
    register(FAMILY)
    config = {**CONFIG, "num_toys": 0}
    found[DENSE] = write_checkpoint(SynthSize(config, 304, 1 << 20), folder / DENSE)
    yield found
    unregister("toy")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key lies here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def kept_bits(llm: LLM) -> np.ndarray:
    """The last kept sequence's keys and values, [layers, arrays, kv_heads, tokens, width]."""

    def look(engine: Engine) -> np.ndarray:
        cache = engine.kv_cache
        kept = cache.kept[-1]
        [rows] = cache.rows(kept, 0, kept.num_written)
        return rows.copy()

    return loop_of(llm).run(look)


def talk(llm: LLM, family: str, text: list[int], num_cached: int) -> list[int]:
    [found] = llm.generate([text], params(family))
    least = num_cached - 2 * (BLOCK_LENGTH if family == "llada2" else 1)
    assert least <= found.usage.cached_tokens <= num_cached
    return [*text, *found.token_ids, 5, 6, 7]


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("family", "budget"),
    [
        *((family, "all") for family in (*FAMILIES, DENSE)),
        *((family, "little") for family in ("gpt_oss", "llada2")),
    ],
)
def test_a_restart_goes_on_with_the_bits_of_memory(
    models: dict[str, Path], family: str, budget: str, tmp_path: Path
) -> None:
    options = {**OPTIONS, "context": 256 if family == DENSE else 512}
    if budget == "little":
        plan = plan_model(models[family], **options)
        options |= {"host_memory": plan.minimum_bytes + 4 * plan.host.slot_bytes}
    with LLM(models[family], **options) as llm:
        text = talk(llm, family, PROMPT, 0)
        first = kept_bits(llm)
        again = talk(llm, family, text, len(text) - 3)
        second = kept_bits(llm)
    options["cache_dir"] = tmp_path / "kept"
    with LLM(models[family], **options) as llm:
        assert talk(llm, family, PROMPT, 0) == text
        np.testing.assert_array_equal(kept_bits(llm), first)
    with LLM(models[family], **options) as llm:
        assert talk(llm, family, text, len(text) - 3) == again
        np.testing.assert_array_equal(kept_bits(llm), second)
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_exactly_after_a_restart_has_the_ids_of_a_cold_run(
    models: dict[str, Path], tmp_path: Path
) -> None:
    options = {**OPTIONS, "context": 1024, "cache": "exact", "cache_dir": tmp_path / "kept"}
    long = [(13 * i + i // 9) % 90 for i in range(600)]
    with LLM(models["qwen3_moe"], **options) as llm:
        [first] = llm.generate([long], params("qwen3_moe"))
    text = [*long, *first.token_ids, 5]
    with LLM(models["qwen3_moe"], **options) as llm:
        [found] = llm.generate([text], params("qwen3_moe"))
    with LLM(models["qwen3_moe"], **{**OPTIONS, "context": 1024, "cache": "off"}) as cold:
        [expected] = cold.generate([text], params("qwen3_moe"))
    assert found.usage.cached_tokens == 512 and found.token_ids == expected.token_ids
    options["cache"] = "on"  # keys of other passes
    with LLM(models["qwen3_moe"], **options) as llm:
        assert llm.generate([text], params("qwen3_moe"))[0].usage.cached_tokens == 0


def test_what_makes_other_keys_finds_none(models: dict[str, Path], tmp_path: Path) -> None:
    """Another type, format, base of rotations, or one expert with other weights."""
    model, folder = models["qwen3_moe"], tmp_path / "kept"
    with LLM(model, cache_dir=folder, **OPTIONS) as llm:
        talk(llm, "qwen3_moe", PROMPT, 0)
    changes: list[dict[str, Any]] = [
        {"dtype": "float32"},
        {"format": "q8"},
        {"kernels": "reference"},
        {"config_overrides": {"rope_theta": 12345.0}},
    ]
    for change in changes:
        with LLM(model, **{**OPTIONS, "cache_dir": folder, **change}) as llm:
            talk(llm, "qwen3_moe", PROMPT, 0)
    other = synth("qwen3_moe", "tiny", tmp_path / "other", seed=5)
    checkpoint = Checkpoint.open(other)
    name = next(n for n in sorted(checkpoint.tensors, reverse=True) if ".experts." in n)
    entry = checkpoint.tensors[name]
    before = fingerprint(checkpoint, checkpoint.tensors, is_thorough=True)
    _flip(checkpoint.files[entry.file].path, entry.offset)
    changed = Checkpoint.open(other)
    assert fingerprint(changed, changed.tensors, is_thorough=True) != before
    with LLM(other, cache_dir=folder, **OPTIONS) as llm:
        talk(llm, "qwen3_moe", PROMPT, 0)
    with LLM(model, cache_dir=folder, **OPTIONS) as llm:
        talk(llm, "qwen3_moe", PROMPT, len(PROMPT) - 1)


def test_every_expert_of_a_stack_is_sampled(models: dict[str, Path], tmp_path: Path) -> None:
    """Where all of a layer's experts are one tensor, the beginning of each."""
    made = synth("gpt_oss", "tiny", tmp_path / "made", seed=5)
    checkpoint = Checkpoint.open(made)
    name = next(n for n, e in checkpoint.tensors.items() if "experts" in n and len(e.shape) > 2)
    entry = checkpoint.tensors[name]
    before = fingerprint(checkpoint, [name], is_thorough=True)
    plain = fingerprint(checkpoint, [name])
    start = entry.offset + entry.num_bytes * (entry.shape[0] - 1) // entry.shape[0]
    _flip(checkpoint.files[entry.file].path, start)
    changed = Checkpoint.open(made)
    assert fingerprint(changed, [name], is_thorough=True) != before
    assert fingerprint(changed, [name]) == plain


def test_what_changes_words_is_not_written(models: dict[str, Path], tmp_path: Path) -> None:
    model, folder = models["qwen3_moe"], tmp_path / "kept"
    with pytest.raises(UsageError, match="`cache` 'exact' gives.*`policy` 'buddymoe' may change"):
        EngineConfig(cache="exact", policy="buddymoe", policy_options={"miss": "buddy"})
    EngineConfig(cache="exact", policy="buddymoe", policy_options={"miss": "wait"})
    changing = {"policy": "buddymoe", "policy_options": {"miss": "buddy"}}
    plan = plan_model(model, cache_dir=folder, **changing, **OPTIONS)
    assert f"Nothing is written to {folder}: its policy may change words." in plan.reason
    plan = plan_model(model, cache="off", cache_dir=folder, **OPTIONS)
    assert f"Nothing is written to {folder}: no keys are kept." in plan.reason
    plan = plan_model(model, cache_dir=folder, **OPTIONS)
    assert f"Kept keys are also written to {folder}, 8GiB at most." in plan.reason
    assert not folder.exists()
    with LLM(model, cache="off", cache_dir=folder, **OPTIONS) as llm:
        talk(llm, "qwen3_moe", PROMPT, 0)
    assert not folder.exists()


class Watched:
    """Rows of the passes that it saw."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def saw_layer(self, layer: int, step: Any, x: torch.Tensor, *_: Any) -> None:
        self.num_rows.append(len(x))


def test_what_is_watched_is_not_read(models: dict[str, Path], tmp_path: Path) -> None:
    model, folder = models["qwen3_moe"], tmp_path / "kept"
    with LLM(model, cache_dir=folder, **OPTIONS) as llm:
        talk(llm, "qwen3_moe", PROMPT, 0)
    watched = Watched()
    with LLM(model, cache_dir=folder, **OPTIONS) as llm:
        with llm.observed(watched):
            talk(llm, "qwen3_moe", PROMPT, 0)
        assert max(watched.num_rows) == len(PROMPT)


def test_a_policy_that_changes_words_ends_it(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under the next one: sequences may have begun under it."""
    is_static = property(lambda options: options.asked.policy == "static")
    monkeypatch.setattr(RunOptions, "changes_words", is_static)
    for policies, is_stored in ((["lru"], True), (["static", "lru"], False)):
        folder = tmp_path / policies[0]
        with LLM(models["qwen3_moe"], cache_dir=folder, **OPTIONS) as llm:
            for policy in policies:
                llm.adopt_policy(policy)
            talk(llm, "qwen3_moe", PROMPT, 0)
        assert bool(list(folder.iterdir())) == is_stored


def test_a_folder_that_cannot_be_trusted_is_refused_before_loading(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="Other users may write to"):
        LLM(models["qwen3_moe"], cache_dir=folder, **OPTIONS)
    for limit, said in (("0", "leaves no room"), ("much", "is not a size"), (12, "would be bytes")):
        with pytest.raises(UsageError, match=said):
            plan_model(models["qwen3_moe"], cache_dir=folder, cache_disk=limit, **OPTIONS)


def test_the_verb_lists_and_clears(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "kept"

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["cache", *arguments])

    result = run("--cache-dir", str(folder))
    assert result.exit_code == 1 and "No such file" in result.stderr.replace("\n", " ")
    assert not folder.exists()
    with LLM(models["qwen3_moe"], cache_dir=folder, **OPTIONS) as llm:
        text = talk(llm, "qwen3_moe", PROMPT, 0)
    [path] = folder.iterdir()
    (folder / path.name[:-6]).write_bytes(b"")  # of another name
    damaged = folder / (path.name[:-6] + ("0" if path.name[-6] != "0" else "1") + ".keys")
    damaged.write_bytes(path.read_bytes())
    os.utime(damaged, ns=(1, 1))
    rows = json.loads(run("--cache-dir", str(folder), "--json").stdout)
    good, bad = rows["files"]
    assert (good["model"], good["tokens"]) == ("qwen3_moe", len(text) - 4)
    assert good["bytes"] == path.stat().st_size and rows["bytes"] == 2 * good["bytes"]
    assert bad["model"] is None and bad["file"] == damaged.name
    table = run("--cache-dir", str(folder))
    assert "qwen3_moe" in table.stdout and "2 conversations" in table.stdout
    assert run("away", "--cache-dir", str(folder)).exit_code == 2
    assert run().exit_code == 2
    cleared = run("clear", "--cache-dir", str(folder), "--json")
    assert json.loads(cleared.stdout) == {"removed": 2, "bytes": rows["bytes"]}
    assert [p.name for p in folder.iterdir()] == [path.name[:-6]]
    assert "removed 0 files" in run("clear", "--cache-dir", str(folder)).stdout
