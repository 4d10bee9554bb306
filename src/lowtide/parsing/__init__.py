"""Parse an answer's token ids, as they come, into text, thoughts and tool calls.

    parser = parser_of(tokenizer, prompt_ids, tools)
    pieces = parser.feed(token_ids)
    pieces += parser.finish()

A call whose arguments are a JSON object is streamed while it is written, name first and to the
letter, even if it is never closed or is invalid JSON. Any other call is reported once it is
certainly complete; text that only looks like a call stays text. The end of a call follows from its
structure: a mark inside a string or a value belongs to it.

Everything follows from the text alone, not from how it is divided, so an answer is the same
streamed and not.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_forms import call_form_of
from lowtide.parsing.channels import CHANNEL_MARKS, ChannelReader, has_channels
from lowtide.parsing.inline_calls import InlineReader
from lowtide.parsing.marked_text import MarkedText
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.pieces import Piece
from lowtide.parsing.thoughts import THINK, is_thinking, thought_marks_of
from lowtide.parsing.tools import Tool


class AnswerParser:
    """Parser of one answer. Pieces come in order and are never taken back."""

    def __init__(
        self, marked: MarkedText, reader: ChannelReader | InlineReader, out: PieceWriter
    ) -> None:
        self.num_reasoning = 0  # tokens of thoughts
        self._marked, self._reader, self._out = marked, reader, out

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        """Return the pieces that are certain after these tokens."""
        for items, num_tokens in self._marked.parts(token_ids):
            for item in items:
                self._reader.take(item)
            self.num_reasoning += num_tokens * self._out.is_reasoning
        return self._out.take()

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """Return the pieces held back, at the answer's end.

        is_cut: the answer ended at its length limit, so an incomplete call is none.
        """
        for item in self._marked.finish():
            self._reader.take(item)
        self._reader.finish(is_cut)
        return self._out.finish()


def parser_of(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], tools: Sequence[Tool] = ()
) -> AnswerParser:
    """Make a parser for the answer to a prompt, for the model's form of thoughts and calls.

    Without tools the marks of calls are plain text.
    """
    out = PieceWriter()
    if has_channels(tokenizer):
        reader = ChannelReader(out, tokenizer, prompt_ids, tools)
        return AnswerParser(MarkedText(tokenizer, CHANNEL_MARKS), reader, out)
    form, thoughts = call_form_of(tokenizer), thought_marks_of(tokenizer)
    marked = MarkedText(tokenizer, (*(thoughts.both if thoughts else ()), *form.marks))
    inline = InlineReader(out, form, tools, thoughts or THINK)
    if is_thinking(tokenizer, prompt_ids):
        inline.begin_thoughts()
    return AnswerParser(marked, inline, out)


def has_thoughts(tokenizer: Tokenizer) -> bool:
    """Return True if the model's tokens mark its thoughts."""
    return thought_marks_of(tokenizer) is not None or has_channels(tokenizer)
