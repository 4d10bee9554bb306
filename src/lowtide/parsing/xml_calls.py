"""Parse calls written as XML, whose values may hold any mark."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lowtide.parsing.call_form import CallForm
from lowtide.parsing.call_json import Call, parsed
from lowtide.parsing.marked_text import Item
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.schema_types import SchemaTypes
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_syntax import MAX_NAME_CHARS
from lowtide.parsing.xml_text import xml_call

_MAX_BLANKS = 64

_MAX_TRIES = 16
"""Most attempts to end a call before the next one; after them the answer's end decides."""


class XmlCalls:
    """Reader that holds calls until they are certain.

    A closing mark belongs to a value if another one follows that nothing inside has opened: the
    last call is therefore certain at the answer's end, and an earlier one where the next call
    begins.
    """

    def __init__(
        self, out: PieceWriter, form: CallForm, tools: Mapping[str, Tool], text: str
    ) -> None:
        self.is_over = False
        self._out, self._form, self._tools = out, form, tools
        self._syntax = form.xml
        self._begin(text)
        self._look()

    @property
    def is_whole(self) -> bool:
        """True if the begun call has probably ended."""
        return self._end >= 0

    @property
    def is_string(self) -> bool:
        """True if a mark would belong to a value."""
        return self._end < 0

    def take(self, item: Item) -> None:
        """Take the next text or mark."""
        self._text += item if isinstance(item, str) else item.text
        while self._look():
            pass

    def finish(self, is_cut: bool) -> None:
        """End the answer; is_cut: at its length limit."""
        while not self.is_over:
            while self._look(is_last=True):
                pass
            end = self._end if self._end >= 0 else self._other_end()
            is_call = end >= 0 and (not is_cut or self._is_certain(end))
            if not is_call or not self._write_call(end):
                self._give_up()
                break
            rest = self._text[end:]
            begin = self._syntax.head.search(rest)
            self._out.write(rest if begin is None else rest[: begin.start()])
            self.is_over = begin is None
            if begin is not None:
                self._begin(rest[begin.start() :])

    def _begin(self, text: str) -> None:
        self._text = text
        self._num_seen = 0  # characters, from the call's head on
        self._depth = 0  # calls that have begun in its values
        self._end = -1  # after the last mark that may be its end
        self._num_tries = 0

    def _look(self, is_last: bool = False) -> bool:
        """Scan new text; return True if a call was written and the next one must be scanned.

        is_last: no more text will follow.
        """
        if not self._num_seen and not self._has_begun():
            return False
        while (tag := self._syntax.tag.search(self._text, self._num_seen)) is not None:
            if tag[0] != self._syntax.function_end:
                after = self._text[tag.end() : tag.end() + _MAX_BLANKS].lstrip()
                begins = self._syntax.body_begins
                if not is_last and any(m.startswith(after) for m in begins):
                    return False  # as long as it is not known what follows
                if self._begins_next(tag):
                    return True
                self._depth += after.startswith(begins)
            elif self._depth:
                self._depth -= 1
            elif not self._note_end(tag.end(), is_last):
                return False
            self._num_seen = tag.end()
        # The beginning of a mark may stand at the end.
        self._num_seen = max(self._num_seen, len(self._text) - MAX_NAME_CHARS - 16)
        return False

    def _has_begun(self) -> bool:
        """Return True if the call's name and the beginning of its body are there.

        Text that cannot become a call is written as text.
        """
        head = self._syntax.head.match(self._text)
        if head is None:
            is_begun = self._syntax.function in self._text
            if is_begun and not self._syntax.part_of_head.match(self._text):
                self._give_up()
            return False
        body = self._text[head.end() :].lstrip()
        if body.startswith(self._syntax.body_begins):
            self._num_seen = head.end()
            return True
        if not any(begin.startswith(body) for begin in self._syntax.body_begins):
            self._give_up()
        return False

    def _begins_next(self, tag: re.Match[str]) -> bool:
        """Write the call if it is complete and a call of a known function follows."""
        if self._end < 0 or tag[1] not in self._tools or self._num_tries == _MAX_TRIES:
            return False
        between = self._syntax.between.match(self._text, self._end)
        is_next = between is not None and between.end() == tag.start()
        if not is_next or not self._syntax.end.search(
            self._text, max(0, self._end - 400), self._end
        ):
            return False
        self._num_tries += 1
        if not self._write_call(self._end, is_strict=True):
            return False
        self._begin(self._text[self._end :].lstrip())
        return True

    def _note_end(self, place: int, is_last: bool) -> bool:
        """Note a possible end of the call; return False if more text must decide."""
        syntax, after = self._syntax, self._text[place:].lstrip()
        if syntax.call_end and after.startswith(syntax.call_end):
            self._end = len(self._text) - len(after) + len(syntax.call_end)
            return True
        is_known = not syntax.call_end or is_last or not syntax.call_end.startswith(after)
        is_bare = self._text.startswith(syntax.function)
        if is_bare or syntax.holds_several or is_known and not after:
            self._end = place
        return is_known

    def _other_end(self) -> int:
        """Find the end of the call if the marks in its values open nothing; -1 if there is none."""
        ends = (each.search(self._text) for each in self._syntax.loose_ends)
        return next((end.end() for end in ends if end is not None), -1) if self._num_seen else -1

    def _is_certain(self, end: int) -> bool:
        """Return True if the call ends here whatever text may have been cut off."""
        syntax, rest = self._syntax, self._text[end:].lstrip()
        begins = (syntax.call_begin or syntax.function, syntax.function)
        if syntax.end.search(self._text, max(0, end - 400), end) is None:
            return False  # its last mark may be a value's
        is_open = syntax.holds_several and not self._text[:end].endswith(syntax.call_end)
        return not is_open and begins[0].startswith(rest) or rest.startswith(begins)

    def _write_call(self, end: int, is_strict: bool = False) -> bool:
        """Write the call up to `end`; return False if it is none.

        is_strict: it must have all arguments that its schema requires.
        """
        text = self._text[:end]
        if self._syntax.call_end:
            text = text.removesuffix(self._syntax.call_end).rstrip()
        call = xml_call(self._syntax, text, self._tools)
        if call is None or is_strict and self._lacks(call):
            return False
        self._out.call(self._form.new_id(), call.name, call.arguments)
        return True

    def _lacks(self, call: Call) -> bool:
        """Return True if a call lacks a required argument."""
        tool, given = self._tools.get(call.name), parsed(call.arguments)
        required = set() if tool is None else SchemaTypes(tool.parameters).required()
        return not isinstance(given, dict) or not required <= given.keys()

    def _give_up(self) -> None:
        self._out.write(self._text)
        self._text, self.is_over = "", True
