"""GGUF files that are laid out otherwise than the `gguf` package writes them, whole or damaged."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import write_gguf
from gguf_layouts import array, mutated, parts_of, rewritten, text
from gguf_oracle import random_model

from lowtide.errors import ConfigError, LowtideError, UnsupportedError
from lowtide.llm import LLM, plan_model
from lowtide.model_folder.gguf_model import GgufModel
from lowtide.model_writing.pack import pack
from lowtide.schemas import bind

KINDS = {"down": Type.Q4_0, "gate": Type.Q5_1, "up": Type.Q8_0, "attn": Type.MXFP4}


def choose(name: str, shape: tuple[int, ...]) -> Type:
    kinds = [kind for part, kind in KINDS.items() if part in name and "norm" not in name]
    is_packed = kinds and "inp" not in name and shape[-1] % 32 == 0
    return kinds[0] if is_packed else Type.F32


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(90)), "a", "aa"])
    writer.add_token_scores([0.0] * 93 + [-1.0, -2.0])
    writer.add_token_types([2, 3, 3] + [6] * 90 + [1, 1])
    writer.add_bos_token_id(1)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts") / f"{request.param}.gguf"
    write_gguf(path, request.param, random_model(request.param, 0), choose, add_tokenizer)
    return path


ODD = (
    array(b"x.bytes", 0, 3, b"\1\2\3"),
    array(b"x.truths", 7, 2, b"\1\0"),
    array(b"x.doubles", 12, 1, struct.pack("<d", 0.5)),
    array(b"x.no_texts", 8, 0, b""),
    array(b"x.texts", 8, 2, text(b"\xff\xfe") + text(b"")),
)


@pytest.mark.parametrize(
    ("alignment", "version", "more_keys"),
    [(8, 3, ODD), (32, 2, ()), (64, 3, ()), (1 << 16, 3, ODD)],
)
def test_any_order_and_alignment_is_the_same_model(
    path: Path, alignment: int, version: int, more_keys: tuple[bytes, ...], tmp_path: Path
) -> None:
    rng = random.Random(alignment)
    other = rewritten(path, tmp_path / "x.gguf", rng, alignment, version, more_keys)
    found = []
    for each in (path, other):
        least = plan_model(each, context=64).minimum_bytes
        with LLM(each, context=64, host_memory=least) as llm:
            found.append(llm.logits(list(range(40))))
    assert torch.equal(*found)


def test_a_thousand_headers_that_lie_field_by_field_are_planned_or_refused(
    path: Path, tmp_path: Path
) -> None:
    data, target, refused = path.read_bytes(), tmp_path / "mutated.gguf", 0
    parts = parts_of(data)
    for number in range(500):  # of each of two models
        target.write_bytes(mutated(data, parts, random.Random(f"{path.name} {number}")))
        try:
            model = GgufModel.open(target)
            config = model.config()
            bind(config, model.checkpoint(config))
            model.tokenizer()
        except LowtideError as error:
            assert len(str(error)) < 1000
            refused += 1
    assert 200 < refused < 500


def test_an_array_for_a_number_is_refused_by_its_key(path: Path, tmp_path: Path) -> None:
    keys = array(b"qwen3moe.rope.dimension_count", 4, 2, bytes(8))
    if "qwen3" not in path.name:
        keys = array(b"deepseek2.attention.q_lora_rank", 4, 2, bytes(8))
    other = rewritten(path, tmp_path / "x.gguf", random.Random(0), more_keys=(keys,))
    with pytest.raises((ConfigError, UnsupportedError), match="an array of 2 values"):
        plan_model(other)


def test_a_file_is_not_packed_and_its_plan_says_so(path: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.gguf"
    write_gguf(plain, "qwen3_moe", random_model("qwen3_moe", 0), lambda name, shape: Type.F32)
    with pytest.raises(
        UnsupportedError, match="not a folder of safetensors; only those are packed"
    ):
        pack(plain, tmp_path / "out", format="q4")
    plan = plan_model(plain, context=64, format="q4")
    assert "that lowtide pack wrote of the model's safetensors" in plan.reason
    with pytest.raises(UnsupportedError, match="rounded already"):
        plan_model(path, context=64, format="q4")
