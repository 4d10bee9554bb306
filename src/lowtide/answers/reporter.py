"""Events as their caller gets them: by the place of their prompt, with text beside ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.decode.request import Committed, Event, Finished, Request, named
from lowtide.model_folder.tokenizer import TextStream, Tokenizer


class Reporter:
    """Puts the places of `requests` and their text into events.

    Owns what of each text was held back. Without a tokenizer, and where it is not read
    (`has_text`), there is no text.
    """

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer | None, has_text: bool = True
    ) -> None:
        self._places = {request.id: place for place, request in enumerate(requests)}
        self._texts: dict[int, TextStream] = {}
        if tokenizer is not None and has_text:
            self._texts = {r.id: tokenizer.stream(r.params.stop_strings) for r in requests}

    def __call__(self, event: Event) -> Event:
        """The same event, named and with its text."""
        return named(self._with_text(event), self._places[event.request])

    def _with_text(self, event: Event) -> Event:
        text = self._texts.get(event.request)
        if text is not None and isinstance(event, Committed):
            return replace(event, text=text.push(event.tokens))
        if text is not None and isinstance(event, Finished):
            return replace(event, text=text.finish())
        return event
