"""A diffusion model's active block as text, for clients that draw it."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.decode.request import Draft
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.pieces import Frame

MASK = "▁"


def frame_of(draft: Draft, num_prompt: int, tokenizer: Tokenizer | None) -> Frame:
    """The active block of a draft as text, without what it has of the prompt."""
    skipped = max(0, num_prompt - draft.block_start)
    places = list(zip(draft.tokens[skipped:], draft.is_masked[skipped:], strict=True))
    texts: list[str] = []
    run: list[int] = []  # tokens between two masks
    for token, is_masked in places:
        if is_masked:
            texts += [_text_of(run, tokenizer), MASK]
            run = []
        else:
            run.append(token)
    num_masked = sum(is_masked for _, is_masked in places)
    return Frame("".join([*texts, _text_of(run, tokenizer)]), num_masked, draft.num_forwards)


def _text_of(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "".join(f"{token} " for token in token_ids)
    return tokenizer.decode(token_ids)
