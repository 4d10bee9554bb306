"""Which positions of a diffusion block are written in a step. Pure functions of numpy arrays.

Arrays are of one block: `is_masked` [block_length] bool, `tokens` and `candidates` int64,
`confidence` float32, the probability of each candidate. What is masked is a boolean array, never
"equal to the mask id".

Sources: the threshold rule is LLaDA2.0's published decoder, token editing is LLaDA2.1's.
"""

from __future__ import annotations

import math

import numpy as np

from lowtide.core import BoolArray, IntArray
from lowtide.decode.sampling import FloatArray


def num_scheduled(block_length: int, steps: int, step: int) -> int | None:
    """Tokens that step `step` (from 0) writes at least; `None` once the schedule is over.

    `block_length` spread evenly over `steps`, the first ones taking the remainder.
    """
    if step >= steps:
        return None
    return block_length // steps + (step < block_length % steps)


def choose_fills(
    is_masked: BoolArray, confidence: FloatArray, num_tokens: int | None, threshold: float
) -> BoolArray:
    """The masked positions whose candidates are written: [block_length] bool.

    All that are surer than `threshold` if those are `num_tokens` or more, else the `num_tokens`
    surest, the earlier of equals. `num_tokens` `None` writes all.

    A chosen position whose candidate is the mask id has used its turn and stays masked: that is
    the published decoder's behaviour, which hands out mask ids if any are left when its schedule
    ends. The caller then makes one more pass, with the mask id excluded from the candidates and
    `None` here: every block ends within its steps and one, and where the published decoder fills
    its block the two are the same.
    """
    if num_tokens is None:
        return is_masked.copy()
    # In float32 as the reference compares: 0.3 is not above its own rounding.
    is_sure = is_masked & (confidence > np.float32(threshold))
    if np.count_nonzero(is_sure) >= num_tokens:
        return is_sure
    order = np.argsort(np.where(is_masked, -confidence, math.inf), kind="stable")
    fills = np.zeros_like(is_masked)
    fills[order[: min(num_tokens, np.count_nonzero(is_masked))]] = True
    return fills


def choose_edits(
    tokens: IntArray,
    is_editable: BoolArray,
    candidates: IntArray,
    confidence: FloatArray,
    threshold: float,
    mask_token_id: int,
) -> BoolArray:
    """The written positions whose token is replaced by another candidate: [block_length] bool.

    `is_editable` are those that are neither masked nor of the prompt; a candidate must be surer
    than `threshold`. Writing never undoes itself: a candidate that is the mask id is no edit
    (the published decoder has no such guard and could go on until its last pass).
    """
    is_other = (candidates != tokens) & (candidates != mask_token_id)
    is_sure = confidence > np.float32(threshold)
    edits: BoolArray = is_editable & is_other & is_sure
    return edits
