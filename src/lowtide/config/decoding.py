"""How a family's models write an answer: one class of facts for each kind of decoding.

Where the kinds differ, the rest of the house asks a fact by its name and no kind by its class.
What a kind does with its facts is the business of `decode/`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self


@dataclass(frozen=True, slots=True)
class DecodingDefaults:
    """A diffusion family's published decoding settings; see `params.DiffusionParams`."""

    block_length: int | None = 32  # None: the whole answer is one
    steps: int = 32  # as the family's own code counts them
    threshold: float | None = 0.95
    edit_threshold: float | None = None
    max_post_steps: int = 16
    remasking: str = "low_confidence"
    eps: float | None = None  # where the schedule ends; of Dream's alone


@dataclass(frozen=True, slots=True)
class Decoding:
    """The facts that every kind has."""

    writes_in_order: ClassVar[bool]
    """Tokens come one by one and stay: grammars, penalties and log-probabilities have a meaning."""

    keeps_keys: ClassVar[bool]
    """Keys and values of finished tokens stay true, so a pass feeds only what is new; else every
    pass feeds whole sequences."""

    redraws: ClassVar[bool]
    """An answer is shown as drafts, whose tokens may yet change."""

    mask_token_id: int | None = None  # None: no token stands for one that is not written yet
    logits_shift: int = 0  # a position's logits come from the hidden state so far before it

    @property
    def block_length(self) -> int:
        """Neighbouring tokens that see each other; 1 where a model has no such blocks."""
        return 1

    def in_model(self, mask_token_id: int | None, block_length: int | None) -> Self:
        """The family's facts with the values of a model's `config.json`; None: it gives none."""
        return replace(self, mask_token_id=mask_token_id)


@dataclass(frozen=True, slots=True)
class Causal(Decoding):
    """One token after the other, each seeing those before it: autoregressive models."""

    writes_in_order: ClassVar[bool] = True
    keeps_keys: ClassVar[bool] = True
    redraws: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Blocks(Decoding):
    """Blocks one after the other, each filled in any order: block diffusion (LLaDA2)."""

    writes_in_order: ClassVar[bool] = False
    keeps_keys: ClassVar[bool] = True
    redraws: ClassVar[bool] = True

    defaults: DecodingDefaults = DecodingDefaults()

    @property
    def block_length(self) -> int:
        return self.defaults.block_length or 1

    def in_model(self, mask_token_id: int | None, block_length: int | None) -> Self:
        defaults = self.defaults
        if block_length is not None:
            defaults = replace(defaults, block_length=block_length)
        return replace(self, mask_token_id=mask_token_id, defaults=defaults)


@dataclass(frozen=True, slots=True)
class Canvas(Decoding):
    """A whole answer, filled in any order by a model in which every position sees every other."""

    writes_in_order: ClassVar[bool] = False
    keeps_keys: ClassVar[bool] = False
    redraws: ClassVar[bool] = True

    defaults: DecodingDefaults = DecodingDefaults(block_length=None)
    is_measured_as_drawn: bool = False  # see `decode.candidates.Reading`
