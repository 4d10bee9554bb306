"""Teacher forcing: reads a given text by the passes of decoding.

`Kind.forced` turns a kind that writes answers into one that reads a text with the same passes,
positions and steps. Tokens are given instead of chosen, and the logits for each choice are passed
out.

An autoregressive model receives the next token after each pass. A diffusion model reads each block
several times over its cached prefix, with ever fewer tokens masked, and finally unmasked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lowtide.core import BoolArray, IntArray
from lowtide.decode.sampling import ArgMax
from lowtide.errors import InternalError, UsageError

OnLogits = Callable[[int, IntArray, Tensor], None]
"""Receives the logits of a choice: the mask's number (0 for an autoregressive model), positions
[n], and logits, float32 [n, vocab] in host memory, read-only and valid during the call."""


@dataclass(frozen=True, slots=True, eq=False)
class ForcedText:
    """A text and how it is read.

    token_ids: [n]; the first `num_context`, at least one, are the prompt.
    masks: for diffusion models, bool [n] each; they hide the text in this order, block by block,
    and never the prompt.

    An autoregressive model's first token after the prompt is chosen in the pass over the prompt,
    not in a decoding pass, so its logits are not reported.
    """

    token_ids: Sequence[int]
    num_context: int
    masks: tuple[BoolArray, ...] = ()

    def check(self, writes_in_order: bool) -> None:
        """Raise UsageError for a text that a model which writes so cannot read."""
        num_tokens = len(self.token_ids)
        num_least = self.num_context + (2 if writes_in_order else 1)
        if self.num_context < 1 or num_tokens < num_least:
            raise UsageError(
                f"A text of {num_tokens} tokens, {self.num_context} of them a prompt: it takes at "
                f"least 1 of a prompt and {num_least - self.num_context} after it."
            )
        if bool(self.masks) == writes_in_order:
            raise UsageError("Masks are for diffusion models, which need at least one.")
        for mask in self.masks:
            if mask.shape != (num_tokens,) or mask[: self.num_context].any():
                raise UsageError(
                    f"A mask is bool [{num_tokens}] and hides none of the first {self.num_context} "
                    "tokens."
                )


def whole_rows(logits: Tensor | ArgMax) -> Tensor:
    if isinstance(logits, ArgMax):
        raise InternalError("A text is read, and only the arg-max of its logits came.")
    return logits
