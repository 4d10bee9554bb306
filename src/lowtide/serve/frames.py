"""A diffusion model's active block, for clients that draw it."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from lowtide.decode.request import Draft
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.pieces import Frame, FrameToken

MASK = "▁"

MAX_PIECES = 1 << 16
"""Most tokens whose text is kept: a canvas has the same ones in every pass."""


class FrameWriter:
    """Makes frames of drafts in one model's tokens. tokenizer None: tokens are shown by their ids.

    Keeps the text of each token that it has shown.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def frame_of(self, draft: Draft, num_prompt: int) -> Frame:
        """Return the answer's part of the active block, with a sign for each masked token."""
        first = max(0, num_prompt - draft.block_start)
        own = slice(first, draft.num_shown)
        places = list(zip(draft.tokens[own], draft.is_masked[own], strict=True))
        text = ""
        for is_masked, run in groupby(places, itemgetter(1)):
            ids = [token for token, _ in run]
            if is_masked:
                text += MASK * len(ids)
            elif self._tokenizer is None:
                text += "".join(f"{token} " for token in ids)
            else:
                text += self._tokenizer.decode(ids)
        return Frame(
            text,
            sum(is_masked for _, is_masked in places),
            draft.num_forwards,
            draft.block_start + first - num_prompt,
            tuple(self._tokens(draft, own)),
        )

    def _tokens(self, draft: Draft, own: slice) -> list[FrameToken]:
        chosen = zip(draft.candidates[own], draft.steps[own], draft.confidence[own], strict=True)
        return [FrameToken(self._piece(token), step, sure) for token, step, sure in chosen]

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            if len(self._pieces) >= MAX_PIECES:
                self._pieces.clear()
            self._pieces[token] = (
                f"{token} " if self._tokenizer is None else self._tokenizer.piece(token)
            )
        return self._pieces[token]
