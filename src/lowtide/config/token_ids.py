"""Special tokens from a model's files, or else from its family's publication."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

from lowtide.config.fields import MAX_VOCAB, Fields
from lowtide.config.model import Published
from lowtide.errors import ConfigError
from lowtide.files.json_file import listed, shown

_log = logging.getLogger(__name__)


def read_eos_token_ids(
    fields: Fields, generation: Mapping[str, object], is_overridden: bool
) -> tuple[int, ...] | None:
    """Read end-of-text ids; None if neither file names any.

    As in transformers, generation_config.json takes precedence: often only it names the token that
    ends a chat turn.
    """
    published = fields.raw("eos_token_id")
    generated = generation.get("eos_token_id")
    if not is_overridden and generated not in (None, []):
        return _token_ids(generated, "generation_config.json")
    return None if published is None else _token_ids(published, "config.json")


def eos_token_ids(
    ids: tuple[int, ...] | None, published: Published, vocab_size: int
) -> tuple[int, ...]:
    """Return the files' ids, or else the family's, that are within the vocabulary."""
    if ids is None:
        return tuple(token for token in published.eos_token_ids if token < vocab_size)
    outside = tuple(token for token in ids if token >= vocab_size)
    inside = tuple(token for token in ids if token < vocab_size)
    if outside:
        _warn_of(outside, vocab_size, has_others=bool(inside))
    return inside


def mask_token_id(fields: Fields, published: int | None, vocab_size: int) -> int | None:
    """Read the mask token's id; None for a family without masks, even if the file names one.

    published: the id that the family's publication gives, if any, and the default.
    """
    mask = fields.optional_integer("mask_token_id", low=0, high=vocab_size - 1)
    if published is None:
        return None
    if mask is None and published >= vocab_size:
        raise ConfigError(
            f"config.json has no mask_token_id, and the family's {published} is not "
            f"in a vocabulary of {vocab_size}: mask_token_id is needed."
        )
    return published if mask is None else mask


def _token_ids(value: object, source: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < MAX_VOCAB:
            raise ConfigError(
                f"{source}: eos_token_id {shown(token)} is not a token id (0 to {MAX_VOCAB - 1})."
            )
    return tuple(dict.fromkeys(ids))


@cache  # once, however often the model is opened
def _warn_of(outside: tuple[int, ...], vocab_size: int, has_others: bool) -> None:
    _log.warning(
        "eos_token_id %s is outside the vocabulary of %d and ignored%s.",
        listed([*map(str, outside)]),
        vocab_size,
        ""
        if has_others
        else "; answers end by length, unless the config override eos_token_id "
        "names a token that ends them",
    )
