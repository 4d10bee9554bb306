"""Accepted forms of prompts, and how one prompt is told from a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowtide.errors import UsageError
from lowtide.model_folder.chat_messages import Message

Messages = Sequence[Message]
TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor
Prompt = str | TokenIds | Messages


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, from one or from a list; a 2-D array has one in each row.

    Raises UsageError for anything else.
    """
    if is_one(prompts):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], listed(prompts)))


def one_prompt(prompt: Prompt) -> Prompt:
    """Return a single prompt. Raise UsageError for a list of prompts."""
    if is_one(prompt):
        return prompt
    raise UsageError(
        f"One prompt is answered here, and this is a list of {len(cast(Sequence[Prompt], prompt))}:"
        " give them one by one, or to generate, which takes a list."
    )


def one_text_of_ids(token_ids: TokenIds | str) -> list[int]:
    """Return ids as a list. Raise UsageError for text and for several lists of ids."""
    if isinstance(token_ids, str):
        raise UsageError(
            f"Token ids are wanted here, not the text {token_ids[:40]!r}: give llm.token_ids(text)."
        )
    ids = listed(token_ids)
    if ids and isinstance(ids[0], Sequence | np.ndarray | Tensor):
        raise UsageError(
            f"The token ids of one text are wanted here, not a list of {type(ids[0]).__name__}: "
            "give one text at a time."
        )
    return cast(list[int], ids)


def is_one(prompt: object) -> bool:
    """Return True for one prompt, False for a list. Raise UsageError for anything else."""
    if isinstance(prompt, str) or is_chat(prompt):
        return True
    if isinstance(prompt, np.ndarray | Tensor):
        return prompt.ndim == 1
    items = listed(prompt)
    return bool(items) and all(isinstance(item, int | np.integer) for item in items)


def is_chat(prompt: object) -> bool:
    """Return True if a prompt is a list of chat messages."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt)
    return is_list and isinstance(cast(Sequence[object], prompt)[0], Mapping)


def listed(value: object) -> list[object]:
    """Return the items of a list or of an array of integers. Raise UsageError."""
    if isinstance(value, np.ndarray):
        _check_array(value.ndim, np.issubdtype(value.dtype, np.integer), str(value.dtype))
        return cast(list[object], value.tolist())
    if isinstance(value, Tensor):
        is_integer = not (value.is_floating_point() or value.is_complex())
        _check_array(value.ndim, is_integer and value.dtype != torch.bool, str(value.dtype))
        return cast(list[object], value.tolist())
    if isinstance(value, bytes | str) or not isinstance(value, Sequence):
        raise UsageError(
            "A prompt is a string, a list or array of token ids or a list of chat messages, not "
            f"{type(value).__name__}{_way_out(value)}."
        )
    return list(value)


def _check_array(num_dims: int, is_integer: bool, dtype: str) -> None:
    if num_dims not in (1, 2) or not is_integer:
        raise UsageError(
            "An array of token ids has integers in one dimension, or in two for several prompts, "
            f"not {dtype} in {num_dims}."
        )


def _way_out(value: object) -> str:
    """Return a hint for objects that other libraries pass as prompts."""
    names = [str(name) for name in value] if isinstance(value, Mapping) else []
    for name in ("input_ids", "prompt_token_ids", "prompt", "messages"):
        if name in names:
            return f"; give what it has under {name!r}"
    return " with one role and content: put it in a list" if "role" in names else ""
