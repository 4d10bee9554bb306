"""A model that also reads images, of which the part that writes text runs; and GGUF's arrays."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowtide.errors import ConfigError, UnsupportedError, UsageError
from lowtide.families import families, read_config, register, unregister
from lowtide.families.gguf import GgufKeys
from lowtide.llm import LLM, plan_model
from lowtide.model_folder.gguf_header import GgufArray
from lowtide.model_writing.synth import synth

WRAPPER = "WrappedForConditionalGeneration"


@pytest.fixture(autouse=True)
def wrapped() -> Iterator[None]:
    family = families()["qwen3_moe"]
    register(replace(family, name="wrapped", architectures=(WRAPPER,), gguf=None))
    yield
    unregister("wrapped")


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """The config as wrappers have it: some keys outside, the others in `text_config`."""
    outer = {key: config.pop(key) for key in ("eos_token_id", "tie_word_embeddings")}
    text = {**config, "architectures": None, "model_type": "wrapped_text"}
    vision = {"hidden_size": 8, "num_hidden_layers": 2}
    return {**outer, "architectures": [WRAPPER], "text_config": text, "vision_config": vision}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_text_is_written_by_the_text_part_alone(tmp_path: Path, prefix: str) -> None:
    plain = synth("qwen3_moe", "tiny", tmp_path / "plain")
    folder = tmp_path / "wrapped"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (plain / name).exists():
            (folder / name).write_bytes((plain / name).read_bytes())
    (folder / "config.json").write_text(
        json.dumps(nested(json.loads((plain / "config.json").read_text())))
    )
    tensors = {
        "model.visual.patch.weight": torch.ones(1024, 512),
        "mtp.fc.weight": torch.ones(4, 4),
    }
    for path in plain.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            head = name if prefix.startswith("model.") else f"language_model.{name}"
            inner = name.replace("model.", prefix, 1)
            tensors[inner if name.startswith("model.") else head] = tensor
    save_file(tensors, folder / "model.safetensors")
    bare, whole = plan_model(plain, context=128), plan_model(folder, context=128)
    assert "2.0 MiB of the files are not loaded" in whole.reason
    assert "not loaded" not in bare.reason
    assert whole.full_bytes == bare.full_bytes
    prompt = list(range(1, 40))
    with LLM(plain, context=128) as llm:
        expected = llm.logits(prompt)
    with LLM(folder, context=128) as llm:
        assert torch.equal(llm.logits(prompt), expected)
        with pytest.raises(UsageError, match="image"):
            content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
            llm.chat([{"role": "user", "content": content}])


def test_keys_count_inside_then_outside() -> None:
    config = nested(dict(families()["qwen3_moe"].sizes()["tiny"].config))
    assert read_config(config).eos_token_ids == (config["eos_token_id"],)
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = True, False
    assert read_config(config).tie_word_embeddings  # the head is of the whole
    del config["tie_word_embeddings"]
    assert not read_config(config).tie_word_embeddings
    config["text_config"]["eos_token_id"] = 7
    assert read_config(config).eos_token_ids == (7,)
    assert read_config(config, overrides={"num_hidden_layers": 1}).num_layers == 1


def test_a_wrapper_that_no_family_knows_is_refused() -> None:
    config = nested(dict(families()["qwen3_moe"].sizes()["tiny"].config))
    with pytest.raises(ConfigError, match="images or sound"):
        read_config({**config, "architectures": ["OtherForConditionalGeneration"]})


def numbers(*values: int) -> GgufArray:
    return GgufArray(4, len(values), struct.pack(f"<{len(values)}I", *values))


def keys_of(**metadata: object) -> GgufKeys:
    return GgufKeys("x", {f"x.{key}": value for key, value in metadata.items()}, {})


def test_gguf_files_may_give_a_number_for_each_layer() -> None:
    keys = keys_of(block_count=3, one=8, same=numbers(8, 8, 8), different=numbers(8, 0, 8))
    assert keys.even("one") == keys.even("same") == 8 and keys.even("none") is None
    assert keys.of_layers("one") == keys.of_layers("same") == [8, 8, 8]
    assert keys.of_layers("different") == [8, 0, 8]
    with pytest.raises(UnsupportedError, match="x.different differs between layers.*: 0, 8"):
        keys.even("different")
    with pytest.raises(ConfigError, match="must be a number, or one for each of 3 layers"):
        keys_of(block_count=3, short=numbers(8, 8)).even("short")
