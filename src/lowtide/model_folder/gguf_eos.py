"""Tokens of a GGUF file that end a text or a turn."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.model_folder.gguf_header import GgufArray, Metadata

ENDS = frozenset(
    (
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|return|>",
        "<|call|>",
        "<|role_end|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        *("<|user|>", "<|observation|>"),  # GLM begins the next turn itself
        *("<eos>", "<turn|>"),  # Gemma
        *("[EOS]", "[EOT]"),  # Kimi
        "[e~[",  # MiniMax
    )
)
"""Control tokens that end an answer in every model that has them.

Files name one or two, while a model's `generation_config.json` has all: gpt-oss also stops at its
tool calls.
"""

TOOL_RESPONSE = "<|tool_response>"
"""Token after Gemma 4's calls, where the client's part begins; text in its files' own words."""

CONTROL, USER_DEFINED = 3, 4
"""Values in `tokenizer.ggml.token_type` of tokens that are found before a text is split."""


def ending_ids(metadata: Metadata) -> list[object]:
    """List the ids named by the file, then those of its tokens that are `ENDS`, each once."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    said: list[object] = [metadata[key] for key in keys if key in metadata]
    return list(dict.fromkeys([*said, *_named(metadata)]))


def _named(metadata: Metadata) -> Iterator[int]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, GgufArray) or not isinstance(kinds, GgufArray):
        return
    if not tokens.is_text or kinds.is_text or kinds.num_elements != tokens.num_elements:
        return
    pairs = zip(tokens.strings(), kinds.numbers(), strict=True)
    for number, (text, kind) in enumerate(pairs):
        if kind == CONTROL and text in ENDS or kind == USER_DEFINED and text == TOOL_RESPONSE:
            yield number
