"""llama.cpp's vocabularies: texts and their token ids; those that lowtide does not read by name."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lowtide.errors import UnsupportedError
from lowtide.model_folder.gguf_header import GgufHeader
from lowtide.model_folder.gguf_tokenizer import gguf_tokenizer
from lowtide.model_folder.tokenizer import Tokenizer

BETWEEN = "\n__ggml_vocab_test__\n"


def run(llama: Path) -> int:
    """Print each vocabulary; return 1 where one that is read gives other ids, else 0."""
    found = [_read(path) for path in sorted((llama / "models").glob("ggml-vocab-*.gguf"))]
    unread = [f"{one.name} ({one.reason})" for one in found if one.reason]
    print(f"{len(found) - len(unread)} of {len(found)} compared; not: {', '.join(unread)}")
    return int(any(one.num_different for one in found))


class _Found(NamedTuple):
    """A vocabulary. reason: why its texts are not compared, or ""."""

    name: str
    reason: str = ""
    num_different: int = 0


def _read(path: Path) -> _Found:
    name, texts_at = path.stem.removeprefix("ggml-vocab-"), path.with_name(f"{path.name}.inp")
    if not texts_at.exists():
        return _Found(name, "without texts")
    metadata = GgufHeader.read(path).metadata
    try:
        tokenizer = gguf_tokenizer(metadata, path)
    except UnsupportedError:
        kind, rule = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        return _Found(name, f"kind {kind}, rule {rule}: not read")
    if tokenizer is None:
        return _Found(name, "no tokenizer")
    return _Found(name, num_different=_num_different(name, tokenizer, texts_at))


def _num_different(name: str, tokenizer: Tokenizer, texts_at: Path) -> int:
    """Count the texts with other ids."""
    texts = texts_at.read_text(encoding="utf-8").split(BETWEEN)
    lines = texts_at.with_suffix(".out").read_text().split("\n")
    if len(lines) == len(texts) + 1 and not lines[-1]:
        lines.pop()  # some files end their last line
    num_different = 0
    for text, line in zip(texts, lines, strict=True):
        found, expected = tokenizer.encode(text, add_special=False), list(map(int, line.split()))
        if found != expected:
            num_different += 1
            print(f"{name} | {text!r} | {found} for {expected}")
    print(f"{name}: {len(texts) - num_different} of {len(texts)} the same")
    return num_different
