"""Rules that choose which positions of a diffusion block a step writes.

Pure functions of numpy arrays over one block: `is_masked` bool [block_length], `tokens` and
`candidates` int64, `confidence` float32, each candidate's probability. Masks are a boolean array,
never "equal to the mask id".

Sources: the threshold rule is LLaDA2.0's published decoder, token editing is LLaDA2.1's.
"""

from __future__ import annotations

import math

import numpy as np

from lowtide.core import BoolArray, IntArray
from lowtide.decode.sampling import FloatArray


def num_scheduled(block_length: int, steps: int, step: int) -> int | None:
    """Return the least number of tokens that step `step` (from 0) writes; None after the schedule.

    `block_length` is spread evenly over `steps`; the first steps take the remainder.
    """
    if step >= steps:
        return None
    return block_length // steps + (step < block_length % steps)


def choose_fills(
    is_masked: BoolArray, confidence: FloatArray, num_tokens: int | None, threshold: float
) -> BoolArray:
    """Choose the masked positions that get their candidates: bool [block_length].

    All with confidence above `threshold` if they are at least `num_tokens`, else the `num_tokens`
    most confident, the earlier of equals. `num_tokens` None writes all.

    If the candidate of a chosen position is the mask id, the position stays masked and has used its
    turn. The published decoder does so, and hands out mask ids left at the end of its schedule. Our
    caller makes one more pass, with the mask id excluded and `num_tokens` None. So every block ends
    within its steps and one, and equals the published result wherever that has no masks left.
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
    """Choose written positions whose token is replaced by another candidate: bool [block_length].

    `is_editable` are positions neither masked nor in the prompt. The candidate's confidence must
    exceed `threshold`. A candidate that is the mask id is not an edit, so that writing is never
    undone; the published decoder lacks this guard and could continue to its last pass.
    """
    is_other = (candidates != tokens) & (candidates != mask_token_id)
    is_sure = confidence > np.float32(threshold)
    edits: BoolArray = is_editable & is_other & is_sure
    return edits
