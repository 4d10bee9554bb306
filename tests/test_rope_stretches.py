"""Rotary embeddings made for longer contexts: linearly, and as Llama 3.1's.

GGUF files have the latter as numbers of each pair of dimensions.
"""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family_models import logits, random_ids, write_model
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import write_gguf
from gguf_oracle import SIZES, check, random_model

from lowtide.config import ModelConfig
from lowtide.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from lowtide.families import families, read_config
from lowtide.llm import plan_model

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FINE_TUNED = {**YARN, "finetuned": True}
ALL = [(family, rope) for family in SIZES for rope in (LINEAR, LLAMA3)]
ALL += [("mixtral", YARN), ("olmoe", YARN)]  # the others: test_contract_family.py
ALL += [("llama", FINE_TUNED)]


def ids(value: object) -> str:
    return str(value["rope_type"]) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("family", "rope"), ALL, ids=ids)
def test_logits_are_those_of_transformers(
    family: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    written = write_model(family, 1, tmp_path, rope_parameters=dict(rope))
    token_ids = random_ids(1, 150)
    ours = logits(written.folder, token_ids, context=256)
    torch.testing.assert_close(ours, written.oracle(token_ids), atol=2e-4, rtol=0)


def config_of(family: str, **rope: object) -> ModelConfig:
    config = {**families()[family].sizes()["full"].config, "rope_scaling": rope}
    return read_config(config)


def test_ling_is_stretched_as_well() -> None:
    """Its published code takes transformers' frequencies, too."""
    rope = config_of("bailing_moe_v2", type="linear", factor=4.0).attention.rope
    assert rope.divisors == (4.0,) and rope.rotary_dim == 64
    rope = config_of("bailing_moe_v2", type="yarn", factor=4.0).attention.rope
    assert rope.yarn is not None and rope.yarn.factor == 4.0


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear"}, "no rope_scaling.factor"),
        ({"type": "linear", "factor": 0.5}, "rope_scaling.factor 0.5 must be a number"),
        ({**LLAMA3, "rope_theta": None, "low_freq_factor": 4.0}, "must be below high_freq_factor"),
    ],
)
def test_numbers_that_cannot_be_are_refused(rope: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of("mixtral", **rope)


def test_keys_of_another_stretch_are_refused() -> None:
    message = "rope_scaling.'alpha' 1000.0 is not supported in the rotary embedding 'dynamic'"
    with pytest.raises(UnsupportedError, match=message):
        config_of("llama", type="dynamic", factor=2.0, alpha=1000.0)


def test_divisors_are_for_gguf_files_alone() -> None:
    with pytest.raises(UnsupportedError, match="'by_pair'") as caught:
        config_of("mixtral", type="by_pair", divisors=[1.0] * 64)
    only = "only 'default', 'yarn', 'linear', 'llama3', 'dynamic'; choose another model."
    assert str(caught.value).endswith(only)


@pytest.mark.parametrize(
    ("family", "key"),
    [*((each, "type") for each in SIZES), ("mixtral", "factor"), ("mixtral", "scale_linear")],
)
def test_files_are_stretched_linearly(family: str, key: str, tmp_path: Path) -> None:
    """By a type and a factor, a factor alone, or the key of the oldest files."""
    model = random_model(family, 1, rope_parameters=dict(LINEAR))

    def add(writer: gguf.GGUFWriter) -> None:
        if key == "scale_linear":
            writer.add_float32(f"{writer.arch}.rope.scale_linear", 4.0)
            return
        writer.add_rope_scaling_factor(4.0)
        if key == "type":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)

    path = tmp_path / "model.gguf"
    write_gguf(path, family, model, lambda name, shape: Type.F16, add)
    check(path, model)


def divisors(num_pairs: int) -> list[float]:
    """Return the divisors that llama.cpp's converter writes for LLAMA3: by wavelength."""
    low, high, length = 1.0, 4.0, 64
    found = []
    for pair in range(num_pairs):
        wavelength = 2 * math.pi * 5e5 ** (pair / num_pairs)
        if wavelength < length / high:
            found.append(1.0)
        elif wavelength > length / low:
            found.append(8.0)
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / 8.0 + smooth))
    return found


def with_divisors(path: Path, values: np.ndarray, family: str = "mixtral") -> torch.nn.Module:
    model = random_model(family, 1, rope_parameters=dict(LLAMA3))
    write_gguf(
        path,
        family,
        model,
        lambda name, shape: Type.Q8_0,
        lambda writer: writer.add_tensor("rope_freqs.weight", values),
    )
    return model


def num_pairs() -> int:
    config = random_model("mixtral", 1).config
    return config.hidden_size // config.num_attention_heads // 2


def test_files_have_a_divisor_of_each_frequency(tmp_path: Path) -> None:
    """Experts made of Llama 3.1 and later, as "llama" with experts."""
    path = tmp_path / "model.gguf"
    values = np.array(divisors(num_pairs()), np.float32)
    assert values.min() == 1.0 and values.max() == 8.0 and len({*values}) > 2
    check(path, with_divisors(path, values))


def test_divisors_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path, count = tmp_path / "model.gguf", num_pairs()
    with_divisors(path, np.ones(count + 1, np.float32))
    with pytest.raises(ConfigError, match=f"{count + 1} rotary frequencies"):
        plan_model(path)
    with_divisors(path, np.full(1, 4.0, np.float32))  # not for all
    with pytest.raises(ConfigError, match="1 rotary frequencies have divisors"):
        plan_model(path)
    with_divisors(path, np.full(count, np.nan, np.float32))
    with pytest.raises(ConfigError, match="must be numbers from 1e-06"):
        plan_model(path)
    with_divisors(path, np.full(count, 1e7, np.float32))
    with pytest.raises(ConfigError, match="must be numbers from 1e-06 to 1e\\+06"):
        plan_model(path)
    with_divisors(path, np.ones(count, np.float16))
    with pytest.raises(CheckpointError, match="'rope_freqs.weight' is of type F16"):
        plan_model(path)
    head_dim = random_model("qwen3_moe", 1).config.head_dim
    with_divisors(path, np.ones(head_dim // 2, np.float32), "qwen3_moe")
    with pytest.raises(UnsupportedError, match="'rope_freqs.weight' is none that lowtide"):
        plan_model(path)


def test_a_disk_that_fails_under_divisors_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    with_divisors(path, np.ones(num_pairs(), np.float32))

    def fails(*args: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(StorageError, match="model.gguf cannot be read: Input/output error"):
        plan_model(path)
    monkeypatch.setattr(os, "pread", lambda *args: b"")
    with pytest.raises(StorageError, match="model.gguf ends inside 'rope_freqs.weight'"):
        plan_model(path)
