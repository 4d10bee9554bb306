"""Answers with thoughts and tool calls between marks: Qwen, DeepSeek, Mistral and their like."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.parsing.call_forms import CallForm
from lowtide.parsing.marked_text import Mark
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.streamed_call import StreamedCall, begins_arguments
from lowtide.parsing.tools import Tool

THOUGHT_MARKS = ("<think>", "</think>")


class InlineReader:
    """Tells thoughts, text and calls apart.

    A call whose arguments are a JSON object is told as it comes; the text of what may be another
    one is held until it is closed.
    """

    def __init__(self, out: PieceWriter, form: CallForm, tools: Sequence[Tool]) -> None:
        self._out, self._form = out, form
        self._tools = {tool.name: tool for tool in tools}
        self._held: str | None = None  # of calls that were begun, what was not told
        self._end = ""  # the mark that closes them
        self._call: StreamedCall | None = None  # the one that is being told

    def take(self, item: str | Mark) -> None:
        """The next text or mark."""
        if isinstance(item, str):
            self._write(item)
        elif self._held is None:
            self._take_mark(item.text)
        elif item.text == self._end:
            self._close(item.text)
        elif item.text == self._form.call_end and self._call is not None:
            self._call = None
        elif not self._end and item.text in self._form.ends:
            self._close()
            self._take_mark(item.text)
        else:
            self._write(item.text)

    def finish(self) -> None:
        """The answer has ended."""
        if self._held is not None:
            self._close()

    def _take_mark(self, mark: str) -> None:
        """One outside of a call."""
        if mark in THOUGHT_MARKS:
            self._out.turn_to(is_reasoning=mark == THOUGHT_MARKS[0])
        elif self._tools and mark in self._form.ends and not self._out.is_reasoning:
            self._held, self._end = mark, self._form.ends[mark]
        elif not (self._out.follows_call and mark in self._form.ends.values()):
            self._out.write(mark)

    def _write(self, text: str) -> None:
        if self._held is None:
            self._out.write(text)
            return
        if self._call is not None:
            text = self._call.push(text)
            if not text:
                return
            self._call = None
        self._held += text
        head = self._form.head.match(self._held)
        if head is None:
            return
        name, rest = head[head.lastindex or 1], self._held[head.end() :]
        if begins_arguments(rest, self._tools.get(name)):  # it is certain that it is a call
            self._call = StreamedCall(self._out, self._form.new_id(), name, "{" in head[0])
            self._held = ""
            self._write(rest)

    def _close(self, end: str = "") -> None:
        """The calls have ended, by their mark or with the answer."""
        held, self._held, self._call = self._held or "", None, None
        if not held.strip():
            return  # all of them were told
        is_closed = bool(end) or self._form.may_end_open
        calls = self._form.read(held + end, self._tools) if is_closed else None
        if not calls:
            self._out.write(held + end)
        for call in calls or ():
            self._out.call(self._form.new_id(), call.name, call.arguments)
