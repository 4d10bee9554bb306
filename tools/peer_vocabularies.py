"""llama.cpp's vocabularies: texts and their token ids; those that lowtide does not read by name."""

from __future__ import annotations

from pathlib import Path

from lowtide.errors import LowtideError
from lowtide.model_folder.gguf_header import GgufHeader
from lowtide.model_folder.gguf_tokenizer import gguf_tokenizer

BETWEEN = "\n__ggml_vocab_test__\n"


def run(llama: Path) -> int:
    """1 where a vocabulary that is read gives other ids, else 0."""
    paths = sorted((llama / "models").glob("ggml-vocab-*.gguf"))
    return int(any([_run_one(path) for path in paths]))


def _run_one(path: Path) -> int:
    """The number of texts with other ids."""
    texts_at = path.with_name(f"{path.name}.inp")
    try:
        tokenizer = gguf_tokenizer(GgufHeader.read(path).metadata, path)
    except LowtideError as error:
        print(f"{path.name}: not read: {str(error).removeprefix(f'{path}: ')}")
        return 0
    if tokenizer is None or not texts_at.exists():
        print(f"{path.name}: no texts")
        return 0
    texts = texts_at.read_text(encoding="utf-8").split(BETWEEN)
    lines = path.with_name(f"{path.name}.out").read_text().split("\n")
    num_different = 0
    for text, line in zip(texts, lines, strict=True):
        found, expected = tokenizer.encode(text, add_special=False), list(map(int, line.split()))
        if found != expected:
            num_different += 1
            print(f"{path.name} | {text!r} | {found} for {expected}")
    print(f"{path.name}: {len(texts) - num_different} of {len(texts)} the same")
    return num_different
