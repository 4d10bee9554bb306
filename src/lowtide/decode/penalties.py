"""Penalties that make tokens of the text so far less (or more) likely."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray
from lowtide.params import SamplingParams


def has_penalties(params: SamplingParams) -> bool:
    """Return True if `penalise` would change anything."""
    is_counted = params.presence_penalty or params.frequency_penalty
    return params.repetition_penalty not in (None, 1) or bool(is_counted)


def penalise(logits: Tensor, tokens: IntArray, num_prompt: int, params: SamplingParams) -> None:
    """Apply the penalties to one row of logits, float32 [vocab], in place.

    tokens: the text so far; its first `num_prompt` tokens are the prompt.

    First the repetition penalty (CTRL, section 4.1), over prompt and answer, divides positive and
    multiplies negative logits. Then OpenAI's presence and frequency penalties, over the answer
    only,
    are subtracted: once per token, and once per use.
    """
    if params.repetition_penalty is not None:
        said = torch.from_numpy(np.unique(tokens)).to(logits.device)
        values, penalty = logits[said], params.repetition_penalty
        logits[said] = torch.where(values > 0, values / penalty, values * penalty)
    presence, frequency = params.presence_penalty or 0.0, params.frequency_penalty or 0.0
    if presence or frequency:
        used, num_uses = np.unique(tokens[num_prompt:], return_counts=True)
        cost = torch.from_numpy((presence + frequency * num_uses).astype(np.float32))
        logits[torch.from_numpy(used).to(logits.device)] -= cost.to(logits.device)
