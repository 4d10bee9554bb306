"""Parse answers with thoughts and tool calls between marks: all but gpt-oss's."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.parsing.call_form import CallForm, Notation
from lowtide.parsing.json_calls import JsonCalls
from lowtide.parsing.literal_calls import LiteralCalls
from lowtide.parsing.marked_text import Item, Mark, Special
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.thoughts import THINK, ThoughtMarks
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_calls import XmlCalls

_MAX_ASIDES = 8
"""Most unclosed calls in thoughts after which the end of the thoughts is searched for."""

_Calls = JsonCalls | XmlCalls | LiteralCalls
_READERS: dict[Notation, type[_Calls]] = {
    Notation.JSON: JsonCalls,
    Notation.XML: XmlCalls,
    Notation.PYTHON: LiteralCalls,
    Notation.GEMMA: LiteralCalls,
}


class InlineReader:
    """Reader that separates thoughts, text and calls.

    A call whose arguments are a JSON object is streamed; the text of another possible call is held
    until it is closed. Calls in thoughts are held until it is known if the thoughts are closed: if
    not, the calls belong to the answer.
    """

    def __init__(
        self,
        out: PieceWriter,
        form: CallForm,
        tools: Sequence[Tool],
        thoughts: ThoughtMarks = THINK,
    ) -> None:
        self._out, self._form, self._thoughts = out, form, thoughts
        self._tools = {tool.name: tool for tool in tools}
        self._opening = ""  # a mark that begins a call, and what follows, before its form is known
        self._calls: _Calls | None = None
        self._aside: _ThoughtCalls | None = None  # calls in thoughts
        self._num_asides = 0
        self._has_thought = False  # thoughts were closed: what follows is text, whatever its marks
        self._name: str | None = None  # what may be the name of the thoughts that have begun

    @property
    def is_idle(self) -> bool:
        """True if the next text is plain."""
        return not self._opening and self._calls is None

    @property
    def is_in_value(self) -> bool:
        """True if the next mark belongs to a value of a call."""
        return self._calls is not None and self._calls.is_string

    @property
    def is_whole(self) -> bool:
        """True if every call that has begun has ended."""
        return not self._opening and (self._calls is None or self._calls.is_whole)

    def begin_thoughts(self) -> None:
        """Begin thoughts, as the prompt may have done."""
        self._out.turn_to(is_reasoning=True)
        self._name = "" if self._thoughts.name else None

    def take(self, item: Item) -> None:
        """Take the next text or mark."""
        if self._name is not None and not self._is_after_name(item):
            return
        if self._aside is not None:
            self._take_aside(self._aside, item)
        elif self._calls is not None:
            self._calls.take(item)
            if self._calls.is_over:
                self._calls = None
        elif self._opening:
            self._open(item)
        elif isinstance(item, str):
            self._out.write(item)
        elif isinstance(item, Mark):
            self._take_mark(item.text)

    def finish(self, is_cut: bool = False) -> None:
        """End the answer; is_cut: at its length limit, so that an open call is none."""
        self._end_name()
        while self._aside is not None:
            aside, self._aside = self._aside, None
            self._finish_aside(aside, is_cut)
        if self._calls is not None:
            self._calls.finish(is_cut)
        self._out.write(self._opening)
        self._calls, self._opening = None, ""

    def _take_mark(self, mark: str) -> None:
        """Take a mark outside of calls."""
        is_first = not self._has_thought and not self._out.is_reasoning
        begin, end = self._thoughts.both
        may_recur = self._thoughts.may_recur
        if mark == begin and (is_first or may_recur or not self._out.has_words):
            self.begin_thoughts()
        elif mark == end and (self._out.is_reasoning or not self._has_thought):
            self._out.turn_to(is_reasoning=False)
            self._has_thought = True
        elif mark == end and may_recur:
            pass
        elif self._tools and mark in self._form.ends:
            if self._out.is_reasoning and self._num_asides == _MAX_ASIDES:
                self._out.write(mark)
            elif self._out.is_reasoning:
                tools = list(self._tools.values())
                self._aside = _ThoughtCalls(self._form, tools, self._thoughts)
                self._take_aside(self._aside, Mark(mark))
            else:
                self._open(Mark(mark))
        elif not (self._out.follows_call and mark in self._form.ends.values()):
            self._out.write(mark)

    def _is_after_name(self, item: Item) -> bool:
        """Return True for an item after the thoughts' name; takes what may belong to that."""
        if not isinstance(item, str):
            self._end_name()
            return True
        name, self._name = self._thoughts.name, (self._name or "") + item
        if f"{name}\n".startswith(self._name):
            return False
        written, self._name = self._name.removeprefix(f"{name}\n"), None
        self._out.write(written)
        return False

    def _end_name(self) -> None:
        written, self._name = self._name, None
        if written and written.strip() != self._thoughts.name:
            self._out.write(written)

    def _open(self, item: Item) -> None:
        """Choose the reader of a call by the text after its mark."""
        if isinstance(item, Special):
            return
        text = item if isinstance(item, str) else item.text
        self._opening += text
        if self._form.is_undecided(self._opening):
            return
        opening, self._opening = self._opening, ""
        reader = _READERS[self._form.notation_of(opening)]
        self._calls = reader(self._out, self._form, self._tools, opening)
        if self._calls.is_over:
            self._calls = None

    def _take_aside(self, aside: _ThoughtCalls, item: Item) -> None:
        begin, end = self._thoughts.both
        is_end = isinstance(item, Mark) and item.text == end
        if is_end and not aside.reader.is_in_value:
            self._say_aside(aside.items)
            self._take_mark(end)
            return
        if isinstance(item, Mark) and item.text == begin and not aside.reader.is_in_value:
            item = begin
        aside.take(item, is_end)
        if aside.reader.is_idle and not aside.out.num_calls:
            self._say_aside(aside.items)

    def _say_aside(self, items: Sequence[Item]) -> None:
        """Write what was held as thoughts."""
        self._aside = None
        for item in items:
            if not isinstance(item, Special):
                self._out.write(item if isinstance(item, str) else item.text)

    def _finish_aside(self, aside: _ThoughtCalls, is_cut: bool) -> None:
        is_whole = aside.reader.is_whole or not aside.end
        aside.reader.finish(is_cut)
        if is_whole and aside.out.num_calls and not is_cut:
            self._out.turn_to(is_reasoning=False)
            self._out.take_over(aside.out)
            return
        self._say_aside(aside.items[: aside.end or None])
        self._num_asides += 1
        if aside.end:
            for item in aside.items[aside.end :]:
                self.take(item)


class _ThoughtCalls:
    """Possible calls within thoughts.

    end: index of the item that would close the thoughts if it belonged to no value; 0: none.
    """

    def __init__(self, form: CallForm, tools: Sequence[Tool], thoughts: ThoughtMarks) -> None:
        self.items: list[Item] = []
        self.end = 0
        self.out = PieceWriter()
        self.reader = InlineReader(self.out, form, tools, thoughts)

    def take(self, item: Item, is_end: bool) -> None:
        if is_end and not self.end:
            self.end = len(self.items)
        self.items.append(item)
        self.reader.take(item)
