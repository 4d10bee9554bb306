"""Prepare events for callers: number them by prompt and add text to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.decode.request import Committed, Draft, Event, Prefill, Request, named
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.answer_pieces import AnswerPieces, pieces_of
from lowtide.parsing.pieces import Reasoning, Text, joined


class Reporter:
    """Renames the requests of events to their places, and adds text and thoughts.

    Owns text held back until it is certain. Without a tokenizer, or with `has_text` False, no text
    is added.
    """

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer | None, has_text: bool = True
    ) -> None:
        self._places = {request.id: place for place, request in enumerate(requests)}
        self._pieces: dict[int, AnswerPieces] = {}
        if has_text:
            self._pieces = {r.id: pieces_of(r, tokenizer) for r in requests}

    def __call__(self, event: Event) -> Event:
        return named(self._with_text(event), self._places[event.request])

    def _with_text(self, event: Event) -> Event:
        pieces = self._pieces.get(event.request)
        if pieces is None or isinstance(event, Prefill | Draft):
            return event
        told = (
            pieces.push(event.tokens)
            if isinstance(event, Committed)
            else pieces.finish(event.finish_reason == "length")
        )
        return replace(event, text=joined(told, Text), reasoning=joined(told, Reasoning))
