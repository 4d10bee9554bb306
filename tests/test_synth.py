"""Synthetic checkpoints: format, determinism, sizes, and that a failure leaves nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoint_files import read_array
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from schema_sizes import num_tensors_of
from test_pack_faults import files_of_at_most

from lowtide.errors import StorageError, UsageError
from lowtide.families import families, read_config, read_config_in
from lowtide.llm import LLM
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.model_writing.synth import plan_shards, synth, write_checkpoint
from lowtide.model_writing.synth_weights import CHARACTER, Noise, tensors_of, to_bfloat16, zipf_bias
from lowtide.schemas import bind, model_schema

SIZES = families()["llada2"].sizes()
TINY = SIZES["tiny"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("llada2", "tiny", tmp_path_factory.mktemp("synth") / "tiny")


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def read(folder: Path, name: str) -> np.ndarray[Any, Any]:
    bits = read_array(Checkpoint.open(folder), name)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_the_library_reads_every_tensor(tiny: Path) -> None:
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    expected = {t.name: t for t in tensors_of(TINY)}
    assert index["weight_map"].keys() == expected.keys()
    num_bytes = 0
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(tiny / shard, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                assert index["weight_map"][name] == shard
                assert tuple(tensor.shape) == expected[name].shape
                assert tensor.isfinite().all()
                num_bytes += tensor.nbytes
    assert num_bytes == index["metadata"]["total_size"]


def test_the_engine_accepts_it(tiny: Path) -> None:
    config = read_config_in(tiny)
    checkpoint = Checkpoint.open(tiny)
    bind(config, checkpoint)
    assert len(checkpoint.files) > 1
    assert config.decoding.mask_token_id == TINY.config["mask_token_id"]
    tokenizer = Tokenizer.load(tiny)
    tokenizer.check_vocabulary(config.vocab_size)
    assert tokenizer.token_id("<|mask|>") == config.decoding.mask_token_id
    assert tokenizer.eos_token_ids == config.eos_token_ids


def test_equal_seeds_give_equal_files(tiny: Path, tmp_path: Path) -> None:
    assert digest(synth("llada2", "tiny", tmp_path / "again")) == digest(tiny)
    other = digest(synth("llada2", "tiny", tmp_path / "other", seed=1))
    assert other["config.json"] == digest(tiny)["config.json"]
    assert all(other[name] != digest(tiny)[name] for name in other if name.endswith("safetensors"))


def test_full_is_the_published_model() -> None:
    size = SIZES["full"]
    tensors = list(tensors_of(size))
    assert len(tensors) == 14_813
    assert round(sum(math.prod(t.shape) for t in tensors) / 1e9, 2) == 16.26
    assert round(sum(t.output.num_bytes for t in tensors) / 2**30, 1) == 30.3
    shards = plan_shards(tensors, size.max_shard_bytes)
    assert len(shards) == 8
    assert all(sum(t.output.num_bytes for t in shard) <= 4 << 30 for shard in shards)
    assert read_config(size.config).decoding.mask_token_id == 156895
    assert size.eos_token_id == 156892


@pytest.mark.parametrize("size", SIZES)
def test_every_size_follows_the_schema(size: str) -> None:
    chosen = SIZES[size]
    tensors = list(tensors_of(chosen))
    schema = model_schema(read_config(chosen.config))
    assert len({t.name for t in tensors}) == num_tensors_of(schema)
    assert tensors[0].name == "model.word_embeddings.weight"
    assert tensors[-1].name == "lm_head.weight"


def test_a_model_published_in_fp8_is_written_in_it(tmp_path: Path) -> None:
    size = families()["minimax_m2"].sizes()
    said = size["full"].config["quantization_config"]
    rounded = replace(size["tiny"], config={**size["tiny"].config, "quantization_config": said})
    write_checkpoint(rounded, tmp_path / "model", seed=1)
    checkpoint = Checkpoint.open(tmp_path / "model")
    layer = "model.layers.1."
    kinds = {name: checkpoint.tensors[layer + name].dtype for name in (
        "self_attn.q_proj.weight", "block_sparse_moe.experts.3.w2.weight",
        "block_sparse_moe.experts.3.w2.weight_scale_inv", "block_sparse_moe.gate.weight",
    )}  # fmt: skip
    assert list(kinds.values()) == ["F8_E4M3", "F8_E4M3", "F32", "BF16"]
    plain = synth("minimax_m2", "tiny", tmp_path / "plain", seed=1)
    logits = []
    for folder in (tmp_path / "model", plain):
        with LLM(folder, context=64, dtype="float32") as llm:
            logits.append(llm.logits(list(range(1, 40))))
    rounded_std, plain_std = (float(each.std()) for each in logits)
    assert rounded_std == pytest.approx(plain_std, rel=0.1)


def test_experts_lie_together_as_down_gate_up(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    prefix = "model.layers.1.mlp.experts.3."
    down, gate, up = (
        checkpoint.tensors[f"{prefix}{part}_proj.weight"] for part in ("down", "gate", "up")
    )
    assert down.offset + down.num_bytes == gate.offset
    assert gate.offset + gate.num_bytes == up.offset


def test_experts_differ(tiny: Path) -> None:
    names = [t.name for t in tensors_of(TINY) if ".experts." in t.name]
    checkpoint = Checkpoint.open(tiny)
    seen = {read_array(checkpoint, name).tobytes() for name in names}
    assert len(seen) == len(names)


def test_weights_have_the_sizes_they_should(tiny: Path) -> None:
    gate = read(tiny, "model.layers.1.mlp.experts.0.gate_proj.weight")
    assert gate.std() == pytest.approx(1 / math.sqrt(64), rel=0.1)
    assert (read(tiny, "model.norm.weight") == 1).all()
    head = read(tiny, "lm_head.weight")
    assert (head[TINY.eos_token_id :] == 0).all()
    assert (np.abs(head[: TINY.eos_token_id]).sum(1) > 0).all()
    assert len(np.unique(head[: TINY.eos_token_id], axis=0)) == TINY.eos_token_id
    embeddings = read(tiny, "model.word_embeddings.weight")
    assert len(np.unique(embeddings, axis=0)) == len(embeddings)


def test_the_routing_bias_is_skewed_and_differs_by_layer(tiny: Path) -> None:
    biases = [read(tiny, f"model.layers.{i}.mlp.gate.expert_bias") for i in (1, 2)]
    assert not np.array_equal(biases[0], biases[1])
    for bias in biases:
        assert bias.max() == 0
        assert bias.min() == pytest.approx(-CHARACTER.expert_bias, rel=0.01)
        assert np.array_equal(np.sort(bias), np.sort(biases[0]))


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_bias_is_a_permutation_of_one_curve(num_experts: int, seed: int) -> None:
    bias = zipf_bias(num_experts, 0.5, np.random.default_rng(seed))
    assert len(np.unique(bias)) == num_experts
    assert bias.max() == 0


@examples(20)
@given(st.lists(st.integers(1, 400_000), min_size=1, max_size=5))
def test_noise_has_the_length_asked_for(lengths: list[int]) -> None:
    noise = Noise(0, 1)
    for length in lengths:
        assert sum(len(part) for part in noise.stretch(length, 0.5)) == length


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_is_the_nearest(value: float) -> None:
    import torch

    expected = torch.tensor([value]).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16(np.array([value], np.float32)), expected)


def test_progress_counts_the_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    synth("llada2", "tiny", tmp_path / "m", progress=lambda _, *counts: calls.append(counts))
    done = [d for d, _ in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] == sum(t.output.num_bytes for t in tensors_of(TINY))


@pytest.mark.parametrize(
    ("family", "size", "seed"), [("gpt", "tiny", 0), ("llada2", "huge", 0), ("llada2", "tiny", -1)]
)
def test_unknown_families_sizes_and_seeds(
    tmp_path: Path, family: str, size: str, seed: int
) -> None:
    with pytest.raises(UsageError):
        synth(family, size, tmp_path / "m", seed=seed)
    assert list(tmp_path.iterdir()) == []


def test_a_family_may_be_written_with_dashes(tmp_path: Path) -> None:
    assert (synth("qwen3-moe", "tiny", tmp_path / "m") / "config.json").exists()


@pytest.mark.parametrize("name", ["config.json", "notes.txt", "x.partial", "model.safetensors"])
def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    (tmp_path / "model-00001-of-00003.safetensors.partial").write_text("")
    before = digest(tmp_path)
    with pytest.raises(UsageError, match=f"not empty.*{name}"):
        synth("llada2", "tiny", tmp_path)
    assert digest(tmp_path) == before


def test_what_a_killed_run_left_is_replaced(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00003.safetensors.partial").write_text("half")
    (tmp_path / ".config.json.0a1b2c3d").write_text("{")
    assert digest(synth("llada2", "tiny", tmp_path)) == digest(tiny)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("mine")
    for out in (tmp_path / "m", tmp_path / "m" / "below"):
        with pytest.raises(StorageError):
            synth("llada2", "tiny", out)
    assert (tmp_path / "m").read_text() == "mine"


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="1000 are free"):
        synth("llada2", "tiny", tmp_path / "new" / "m")
    assert list(tmp_path.iterdir()) == []


class Faults:
    """Counts what a run asks of the disk, and raises at one of these calls."""

    CALLS = ("write", "fsync", "replace")

    def __init__(self, fail_at: int = -1, error: BaseException | None = None) -> None:
        self.count = 0
        self.replaced: list[str] = []
        self._fail_at, self._error = fail_at, error

    @contextmanager
    def injected(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            for name in self.CALLS:
                patched.setattr(os, name, partial(self._call, getattr(os, name)))
            yield

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.count += 1
        if self.count == self._fail_at and self._error is not None:
            raise self._error
        if function.__name__ == "replace":
            self.replaced.append(Path(arguments[1]).name)
        return function(*arguments)


def spread(total: int) -> Iterator[int]:
    """The first and last ones, and some in between."""
    return iter(sorted({1, 2, *range(3, total, total // 8), *range(total - 12, total + 1)}))


@pytest.mark.parametrize("kind", ["interrupt", "full disk"])
def test_a_failure_at_any_call_leaves_nothing(tmp_path: Path, kind: str) -> None:
    error: BaseException = KeyboardInterrupt()
    expected: type[BaseException] = KeyboardInterrupt
    if kind == "full disk":
        error, expected = OSError(errno.ENOSPC, "No space left on device"), StorageError
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "earlier").write_text("mine")
    whole = Faults()
    with whole.injected():
        synth("llada2", "tiny", tmp_path / "kept" / "probe")
    before = digest(tmp_path / "kept" / "probe")
    for fail_at in spread(whole.count):
        with Faults(fail_at, error).injected(), pytest.raises(expected):
            synth("llada2", "tiny", tmp_path / "new" / "m")
        assert not (tmp_path / "new").exists()
    assert digest(tmp_path / "kept" / "probe") == before
    assert (tmp_path / "kept" / "earlier").read_text() == "mine"


@pytest.mark.parametrize("num_bytes", [0, 100, 10_000, 300_000])
def test_a_disk_that_takes_no_longer_files(tmp_path: Path, num_bytes: int) -> None:
    with files_of_at_most(num_bytes), pytest.raises(StorageError, match="File too large"):
        synth("llada2", "tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_in_the_progress_callback(tmp_path: Path) -> None:
    def interrupt(what: str, done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synth("llada2", "tiny", tmp_path / "m", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_config_json_comes_last(tmp_path: Path) -> None:
    faults = Faults()
    with faults.injected():
        synth("llada2", "tiny", tmp_path / "m")
    assert faults.replaced[-1] == "config.json"
