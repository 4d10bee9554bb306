"""Parse calls with JSON arguments, from their opening mark to their end."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lowtide.parsing.call_form import CallForm
from lowtide.parsing.json_scan import JsonScan
from lowtide.parsing.marked_text import Item, Special
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.streamed_call import StreamedCall, begin_of_arguments
from lowtide.parsing.tools import Tool


class JsonCalls:
    """Reader that streams calls, and holds the text of other possible calls until they close.

    A mark inside a string belongs to it. Text that only looks like a call is written as text as
    soon as that is certain.
    """

    def __init__(
        self, out: PieceWriter, form: CallForm, tools: Mapping[str, Tool], text: str
    ) -> None:
        self.is_over = False
        self._out, self._form, self._tools = out, form, tools
        # The mark that closes them.
        self._end = next(end for mark, end in form.ends.items() if text.startswith(mark))
        self._begins: dict[str, re.Pattern[str]] = {}  # of arguments, by function
        self._held = ""  # text not yet written or streamed
        self._num_scanned = 0  # characters of it
        self._scan: JsonScan | None = None  # of a value in it
        self._is_value_over = False
        self._call: StreamedCall | None = None  # being streamed
        self._write(text)

    @property
    def is_string(self) -> bool:
        """True if the next character is inside a string."""
        if self._call is not None:
            return self._call.is_string
        return self._scan is not None and self._scan.is_string and not self._is_value_over

    @property
    def is_whole(self) -> bool:
        """True if every call that has begun has ended."""
        return not self._held.strip() and (self._call is None or self._call.is_whole)

    def take(self, item: Item) -> None:
        """Take the next text or mark."""
        text = item if isinstance(item, str) else item.text
        if self.is_string or isinstance(item, str):
            self._write(text)
        elif isinstance(item, Special):
            pass
        elif text == self._end and not self._form.is_value(self._held):
            self._close(text)
        elif text == self._form.call_end and self._call is not None:
            self._call = None
        elif not self._end and text in self._form.ends:
            self._close()
            self.is_over = False
            self._write(text)
        else:
            self._write(text)

    def finish(self, is_cut: bool) -> None:
        """End the answer; is_cut: at its length limit."""
        self._close(is_cut=is_cut)

    def _write(self, text: str) -> None:
        if self._call is not None:
            text = self._call.push(text)
            if not text:
                return
            self._call = None
        self._held += text
        head = self._form.head.match(self._held)
        if head is not None:
            name, rest = next(filter(None, head.groups())), self._held[head.end() :]
            if name not in self._begins:
                self._begins[name] = begin_of_arguments(self._tools.get(name))
            if self._begins[name].match(rest):  # certainly a call
                call_id = self._form.new_id(head.groupdict().get("id"))
                self._call = StreamedCall(self._out, call_id, name, "{" in head[0])
                self._forget_held()
                self._write(rest)
                return
        self._follow()
        if self._scan is None and self._form.is_no_call(self._held):
            self._out.write(self._held)
            self._forget_held()
            self.is_over = True

    def _follow(self) -> None:
        """Scan the held text for the end of its JSON value."""
        if self._scan is None:
            begin = self._form.json_begin.match(self._held)
            if begin is None:
                return
            self._scan = JsonScan(brackets="[]" if begin[1] == "[" else "{}")
            self._num_scanned = begin.start(1)
        if not self._is_value_over:
            end = self._scan.end(self._held[self._num_scanned :])
            self._num_scanned, self._is_value_over = len(self._held), end is not None

    def _forget_held(self) -> None:
        self._held, self._num_scanned, self._scan, self._is_value_over = "", 0, None, False

    def _close(self, end: str = "", is_cut: bool = False) -> None:
        """End the calls, at their closing mark or with the answer."""
        held, self._call, self.is_over = self._held, None, True
        is_over = self._is_value_over
        self._forget_held()
        if not held.strip():
            return  # all calls were streamed
        is_closed = bool(end) or is_over or self._form.is_closed(held, is_cut)
        calls = self._form.read(held + end, self._tools) if is_closed else None
        if not calls:
            self._out.write(held + end)
        for call in calls or ():
            self._out.call(self._form.new_id(), call.name, call.arguments)
