"""Answers with thoughts and tool calls between marks: Qwen, DeepSeek, Mistral and their like."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.parsing.call_forms import CallForm
from lowtide.parsing.marked_text import Mark
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.tools import Tool

THOUGHT_MARKS = ("<think>", "</think>")


class InlineReader:
    """Tells thoughts, text and calls apart; a call's text is kept until it is closed."""

    def __init__(self, out: PieceWriter, form: CallForm, tools: Sequence[Tool]) -> None:
        self._out, self._form, self._tools = out, form, tools
        self._call: list[str] | None = None  # of one that was begun, its text so far
        self._end = ""  # the mark that closes it

    def take(self, item: str | Mark) -> None:
        """The next text or mark."""
        if isinstance(item, str):
            self._write(item)
        elif self._call is None:
            self._take_mark(item.text)
        elif item.text == self._end:
            self._call.append(item.text)
            self._close()
        elif not self._end and item.text in self._form.ends:
            self._close()
            self._take_mark(item.text)
        else:
            self._call.append(item.text)

    def finish(self) -> None:
        """The answer has ended."""
        if self._call is not None and self._form.may_end_open:
            self._close()
        elif self._call is not None:
            self._out.write("".join(self._call))
            self._call = None

    def _take_mark(self, mark: str) -> None:
        """One outside of a call."""
        if mark in THOUGHT_MARKS:
            self._out.turn_to(is_reasoning=mark == THOUGHT_MARKS[0])
        elif self._tools and mark in self._form.ends and not self._out.is_reasoning:
            self._call, self._end = [mark], self._form.ends[mark]
        elif not (self._out.follows_call and mark in self._form.ends.values()):
            self._out.write(mark)

    def _write(self, text: str) -> None:
        if self._call is None:
            self._out.write(text)
        else:
            self._call.append(text)

    def _close(self) -> None:
        text, self._call = "".join(self._call or ()), None
        calls = self._form.read(text, self._tools)
        if not calls:
            self._out.write(text)
            return
        for call in calls:
            self._out.call(self._form.new_id(), call.name, call.arguments)
