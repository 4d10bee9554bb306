"""The tokenizer of a synthetic checkpoint: a byte-level BPE of any size, made by a rule.

Ids 0 to 255 are the bytes. Every id from there to the special tokens joins an earlier token and
one of 27 symbols (space and a to z): first all pairs, then all triples, and so on. So any text
can be encoded, and every id a model without training may write is readable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lowtide.errors import UsageError

SPECIAL_TOKENS = {
    "<|endoftext|>": 0,
    "<|mask|>": 3,
    "<role>": 6,
    "</role>": 7,
    "<|role_end|>": 8,
}
"""Offsets from the end-of-text token's id; the mask's is the published one."""

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "<role>{{ 'HUMAN' if m.role == 'user' else m.role | upper }}</role>{{ m.content }}<|role_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<role>ASSISTANT</role>{% endif %}"
)


def tokenizer_json(eos_token_id: int) -> str:
    """Return a `tokenizer.json` whose special tokens begin at `eos_token_id` (at least 256).

    Ids between special tokens are filled like the rest, so that the vocabulary has no holes.
    """
    if eos_token_id < 256:
        raise UsageError(f"eos_token_id must be at least 256, not {eos_token_id}.")
    special = {text: eos_token_id + offset for text, offset in SPECIAL_TOKENS.items()}
    num_ids = max(special.values()) + 1
    free_ids = [i for i in range(256, num_ids) if i not in special.values()]
    joined = list(islice(_joined_tokens(), len(free_ids)))
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    vocab |= {first + second: i for (first, second), i in zip(joined, free_ids, strict=True)}
    vocab |= special
    backend = Tokenizer(models.BPE(vocab, joined))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return str(backend.to_str())


def tokenizer_config_json() -> str:
    """Return a `tokenizer_config.json` with the special tokens' roles and a chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return json.dumps(config, indent=2)


def _joined_tokens() -> Iterator[tuple[str, str]]:
    symbols = [_byte_symbols()[byte] for byte in b" abcdefghijklmnopqrstuvwxyz"]
    shorter = symbols
    while True:
        pairs = [(first, second) for first in shorter for second in symbols]
        yield from pairs
        shorter = [first + second for first, second in pairs]


def _byte_symbols() -> list[str]:
    """Return the character for each byte in a byte-level vocabulary.

    Visible Latin-1 characters stand for themselves; others are numbered from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(b) if b in visible else chr(0x100 + hidden.index(b)) for b in range(256)]
