"""Files quantised by llama.cpp (`tools/llama_files.py`), beside transformers with their weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import take_weights
from gguf_oracle import check, random_model

FILES = sorted((Path(__file__).parent / "llama_files").glob("*.gguf"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_logits_and_words_are_those_of_the_weights_unpacked(path: Path) -> None:
    family, seed, _ = path.stem.split("-")
    model = random_model(family, int(seed))
    take_weights(path, family, model)
    check(path, model)


def test_every_type_with_many_levels_is_llama_cpps_own_somewhere() -> None:
    kinds = {tensor.tensor_type for path in FILES for tensor in gguf.GGUFReader(path).tensors}
    k_types = {Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K}
    assert kinds >= k_types | {Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4, Type.Q8_0}
