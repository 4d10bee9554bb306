"""Kinds of decoding: one class of facts for each way in which models write an answer.

Other rooms ask for a fact by name, never for the kind's class. The behaviour of a kind is in
`decode/`.
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
    eps: float | None = None  # where Dream's schedule ends


@dataclass(frozen=True, slots=True)
class Decoding:
    """Facts that every kind of decoding has."""

    writes_in_order: ClassVar[bool]
    """Tokens are written one by one and stay: grammars, penalties and log-probabilities apply."""

    keeps_keys: ClassVar[bool]
    """Keys and values of finished tokens stay valid, so a pass feeds only new tokens.

    Otherwise every pass feeds whole sequences.
    """

    redraws: ClassVar[bool]
    """An answer is shown as drafts, whose tokens may still change."""

    mask_token_id: int | None = None  # None: no token marks unwritten positions
    logits_shift: int = 0  # positions between a hidden state and the position of its logits

    @property
    def block_length(self) -> int:
        """Number of adjacent tokens that see each other; 1 without blocks."""
        return 1

    def in_model(self, mask_token_id: int | None, block_length: int | None) -> Self:
        """Return the family's facts with the values of a model's `config.json`; None: not given."""
        return replace(self, mask_token_id=mask_token_id)


@dataclass(frozen=True, slots=True)
class Causal(Decoding):
    """Autoregressive: one token after the other, each seeing those before it."""

    writes_in_order: ClassVar[bool] = True
    keeps_keys: ClassVar[bool] = True
    redraws: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Blocks(Decoding):
    """Block diffusion (LLaDA2): one block after the other, each filled in any order."""

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
    """A whole answer filled in any order by a bidirectional model."""

    writes_in_order: ClassVar[bool] = False
    keeps_keys: ClassVar[bool] = False
    redraws: ClassVar[bool] = True

    defaults: DecodingDefaults = DecodingDefaults(block_length=None)
    is_measured_as_drawn: bool = False  # see `decode.candidates.Reading`
