"""From the token ids of an answer, as they come, to its text, thoughts and tool calls.

    parser = parser_of(tokenizer, prompt_ids, tools)
    pieces = parser.feed(token_ids)
    pieces += parser.finish()

A call whose arguments are a JSON object is told while it is written, name first, to the letter as
the model writes it: also where it is never closed, or is no JSON. Any other is told when it is
certain that it is whole; what only looks like one is text. Where a call ends follows from its
structure: a mark inside a string or a value belongs to it. All of it follows from the text alone,
however it comes, so that an answer is the same streamed and not.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_forms import call_form_of
from lowtide.parsing.channels import CHANNEL_MARKS, ChannelReader, has_channels
from lowtide.parsing.inline_calls import THOUGHT_MARKS, InlineReader
from lowtide.parsing.marked_text import MarkedText, last_mark
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.pieces import Piece
from lowtide.parsing.tools import Tool


class AnswerParser:
    """Reads one answer. Pieces come in order, and none is taken back."""

    def __init__(
        self, marked: MarkedText, reader: ChannelReader | InlineReader, out: PieceWriter
    ) -> None:
        self.num_reasoning = 0  # tokens of thoughts
        self._marked, self._reader, self._out = marked, reader, out

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        """What is certain after these tokens."""
        for token_id in token_ids:
            for item in self._marked.push(token_id):
                self._reader.take(item)
            self.num_reasoning += self._out.is_reasoning
        return self._out.take()

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """What was held back, at the answer's end; is_cut: by its length, so that a call that is
        not whole is none.
        """
        for item in self._marked.finish():
            self._reader.take(item)
        self._reader.finish(is_cut)
        return self._out.finish()


def parser_of(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], tools: Sequence[Tool] = ()
) -> AnswerParser:
    """A parser for the answer to a prompt, in the form that the model writes.

    Without tools the marks of calls are plain text.
    """
    out = PieceWriter()
    if has_channels(tokenizer):
        reader = ChannelReader(out, tokenizer, prompt_ids, tools)
        return AnswerParser(MarkedText(tokenizer, CHANNEL_MARKS), reader, out)
    form = call_form_of(tokenizer)
    thought_marks = THOUGHT_MARKS if has_thoughts(tokenizer) else ()
    marked = MarkedText(tokenizer, (*thought_marks, *form.marks))
    if thought_marks and is_thinking(tokenizer, prompt_ids):
        out.turn_to(is_reasoning=True)
    return AnswerParser(marked, InlineReader(out, form, tools), out)


def has_thoughts(tokenizer: Tokenizer) -> bool:
    """Whether a model's tokens tell its thoughts from its answers."""
    has_marks = all(tokenizer.token_id(mark) is not None for mark in THOUGHT_MARKS)
    return has_marks or has_channels(tokenizer)


def is_thinking(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends with the beginning of thoughts, as some templates write it."""
    mark, behind = last_mark(tokenizer, prompt_ids, THOUGHT_MARKS)
    # A user may have written the mark somewhere in the prompt.
    return mark == THOUGHT_MARKS[0] and not tokenizer.decode(behind, skip_special=False).strip()
