"""Text of a diffusion model's active block, for clients that draw it."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from lowtide.decode.request import Draft
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.pieces import Frame

MASK = "▁"


def frame_of(draft: Draft, num_prompt: int, tokenizer: Tokenizer | None) -> Frame:
    """Return the answer's part of the active block as text, with a sign for each masked token."""
    own = slice(max(0, num_prompt - draft.block_start), draft.num_shown)
    places = list(zip(draft.tokens[own], draft.is_masked[own], strict=True))
    text = ""
    for is_masked, run in groupby(places, itemgetter(1)):
        ids = [token for token, _ in run]
        if is_masked:
            text += MASK * len(ids)
        elif tokenizer is None:
            text += "".join(f"{token} " for token in ids)
        else:
            text += tokenizer.decode(ids)
    return Frame(text, sum(is_masked for _, is_masked in places), draft.num_forwards)
