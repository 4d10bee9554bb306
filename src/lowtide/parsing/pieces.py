"""What an answer is told in while it is written: the same pieces for every API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.decode.request import TokenLogprobs

PART_BREAK = "\n"
"""Between parts of an answer that one field holds."""


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer; never taken back. is_new_part: a call, thoughts or another message
    stand between it and the text before.
    """

    text: str
    is_new_part: bool = False

    @property
    def joined_text(self) -> str:
        """What is added where one field holds all parts."""
        return PART_BREAK + self.text if self.is_new_part else self.text


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thoughts before it. is_new_part: as of `Text`."""

    text: str
    is_new_part: bool = False

    @property
    def joined_text(self) -> str:
        """See `Text`."""
        return PART_BREAK + self.text if self.is_new_part else self.text


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call, whose name is known. index: its place among the answer's calls, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the text of a call's arguments: of JSON, as far as the model writes JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """How far the prompt is: tokens done, of how many."""

    num_done: int
    num_total: int


@dataclass(frozen=True, slots=True)
class Frame:
    """The active block of a diffusion model, none of it final. text: masked places are `▁`."""

    text: str
    num_masked: int
    num_forwards: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the tokens whose text follows, where they were asked for."""

    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The last piece. reason: stop, length or tool_calls; stop_string: which one ended it.
    num_resumed: tokens of the prompt whose keys were kept. token_ids: of the whole answer, thoughts
    and marks included.
    """

    reason: str
    num_prompt: int
    num_new: int
    num_resumed: int
    num_reasoning: int = 0
    stop_string: str | None = None
    token_ids: tuple[int, ...] = ()


Piece = Text | Reasoning | CallBegun | CallArguments | Prefilled | Frame | Logprobs | Done


def joined(pieces: Sequence[Piece], kind: type[Text] | type[Reasoning]) -> str:
    """The text of all pieces of a kind."""
    return "".join(piece.joined_text for piece in pieces if isinstance(piece, kind))
