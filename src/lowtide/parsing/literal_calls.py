"""Parse calls whose arguments are literals, held until they are complete."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.parsing.call_form import CallForm
from lowtide.parsing.marked_text import Item, Mark
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.tools import Tool

_MAX_TRIES = 16
"""Most marks at which the end of the calls is looked for; then the answer's end decides."""

_MAX_HEAD_CHARS = 1024
"""Longest text in which a call's name and opening bracket are looked for."""


class LiteralCalls:
    """Reader that takes a closing mark for the end only if the calls before it are complete.

    Otherwise the mark belongs to a string.
    """

    def __init__(
        self, out: PieceWriter, form: CallForm, tools: Mapping[str, Tool], text: str
    ) -> None:
        self.is_over = False
        self._out, self._form, self._tools = out, form, tools
        self._begin = next(mark for mark in form.ends if text.startswith(mark))
        self._text, self._num_tries = text, 0
        self._look()

    @property
    def is_whole(self) -> bool:
        """True if the begun calls are complete."""
        return self._form.read(self._text, self._tools) is not None

    @property
    def is_string(self) -> bool:
        """True if a mark would belong to a string."""
        return not self.is_whole

    def take(self, item: Item) -> None:
        """Take the next text or mark."""
        text = item if isinstance(item, str) else item.text
        is_mark = isinstance(item, Mark) and text in (self._form.ends[self._begin], self._begin)
        if is_mark and self._num_tries < _MAX_TRIES:
            self._num_tries += 1
            if self._write_calls():
                self.is_over = text != self._begin
                self._text, self._num_tries = text, 0
                return
        self._text += text
        self._look()

    def finish(self, is_cut: bool) -> None:
        """End the answer; is_cut: at its length limit, so that calls without a mark are none."""
        if not self.is_over and (is_cut or not self._write_calls()):
            self._out.write(self._text)
        self.is_over = True

    def _look(self) -> None:
        """Write text that cannot become a call as text."""
        if len(self._text) < _MAX_HEAD_CHARS and self._form.is_no_call(self._text):
            self._out.write(self._text)
            self.is_over = True

    def _write_calls(self) -> bool:
        calls = self._form.read(self._text, self._tools)
        for call in calls or ():
            self._out.call(self._form.new_id(), call.name, call.arguments)
        return bool(calls)
