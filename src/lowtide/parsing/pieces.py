"""Pieces of an answer while it is written, the same for every API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.decode.request import TokenLogprobs

PART_BREAK = "\n"
"""Separator between parts of an answer that share one field."""


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer's text.

    is_new_part: a call, thoughts or another message precede it.
    """

    text: str
    is_new_part: bool = False

    @property
    def joined_text(self) -> str:
        """The text to append if one field holds all parts."""
        return PART_BREAK + self.text if self.is_new_part else self.text


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thoughts. is_new_part: as in `Text`."""

    text: str
    is_new_part: bool = False

    @property
    def joined_text(self) -> str:
        return PART_BREAK + self.text if self.is_new_part else self.text


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call whose name is known. index: its position among the answer's calls, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments as text, normally JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Progress of the prompt in tokens."""

    num_done: int
    num_total: int


class FrameToken(NamedTuple):
    """One place of a frame: a written token, or the model's present choice for a masked one."""

    text: str
    step: int  # the pass that wrote it, counted from 1; 0: none has
    confidence: float  # the token's probability as it was chosen


@dataclass(frozen=True, slots=True)
class Frame:
    """The current block of a diffusion model, none of it final. Masked places are `▁` in `text`.

    start: of the block, in tokens of the answer. tokens: of its places, as far as the model's kind
    tells them.
    """

    text: str
    num_masked: int
    num_forwards: int
    start: int
    tokens: tuple[FrameToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities, if requested, of the tokens whose text follows."""

    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The last piece of an answer.

    reason: stop, length or tool_calls.
    stop_string: the one that ended the answer.
    num_resumed: prompt tokens whose keys were reused.
    token_ids: of the whole answer, thoughts and marks included.
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
    """Join the text of all pieces of a kind."""
    return "".join(piece.joined_text for piece in pieces if isinstance(piece, kind))
