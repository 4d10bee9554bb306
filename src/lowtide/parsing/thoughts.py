"""Marks around a model's thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.marked_text import last_mark


class ThoughtMarks(NamedTuple):
    """The marks of thoughts, both of them tokens.

    name: written after the first mark, and no part of the thoughts.
    may_recur: thoughts may follow text, and a mark that opens or closes nothing is not text.
    """

    begin: str
    end: str
    name: str = ""
    may_recur: bool = False

    @property
    def both(self) -> tuple[str, str]:
        return self.begin, self.end


THINK = ThoughtMarks("<think>", "</think>")
CHANNEL = ThoughtMarks("<|channel>", "<channel|>", "thought", may_recur=True)
"""Gemma 4's."""


def thought_marks_of(tokenizer: Tokenizer) -> ThoughtMarks | None:
    """Return the marks that a model's tokens have; None if they have none."""
    for marks in (THINK, CHANNEL):
        if all(tokenizer.token_id(mark) is not None for mark in marks.both):
            return marks
    return None


def is_thinking(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Return True if the prompt ends by opening the thoughts, as some templates do."""
    marks = thought_marks_of(tokenizer)
    if marks is None:
        return False
    mark, after = last_mark(tokenizer, prompt_ids, marks.both)
    # A user may have written the mark somewhere in the prompt.
    rest = tokenizer.decode(after, skip_special=False).strip()
    return mark == marks.begin and rest in ("", marks.name)
