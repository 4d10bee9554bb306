"""Which masked positions are written in a step of masked diffusion. Pure functions of numpy arrays.

Arrays are of the positions that may still change, ascending: `confidence` [n] float64, and what is
returned, [n] bool, is true for those that are written. Where confidences are equal the lower
position comes first. What is masked is known by its position, never by "equal to the mask id".

Sources: fixed counts are LLaDA's `generate`; the decreasing share, its independent draws and its
tempered choice are Dream's `diffusion_generate`; threshold and factor are Fast-dLLM's.
"""

from __future__ import annotations

import numpy as np

from lowtide.core import BoolArray, FloatArray, IntArray


def num_by_share(num_masked: int, times: FloatArray, step: int) -> int:
    """Tokens that step `step` (from 0) of Dream's schedule writes.

    times: [steps + 1] float32, falling from 1 to `eps`: of what is masked at time t the share
    s / t still is at the next time s. The last step writes all. In float32, whose rounding decides
    where the product is nearly whole.
    """
    if step >= len(times) - 2:
        return num_masked
    return int(np.float32(num_masked) * written_share(times, step))


def written_share(times: FloatArray, step: int) -> np.float32:
    """The probability with which `origin` writes a masked position in a step; 1 in the last."""
    if step >= len(times) - 2:
        return np.float32(1)
    share: np.float32 = np.float32(1) - np.float32(times[step + 1]) / np.float32(times[step])
    return share


def choose_surest(confidence: FloatArray, num_tokens: int) -> BoolArray:
    """The `num_tokens` surest, or all."""
    chosen = np.zeros(len(confidence), np.bool_)
    chosen[_descending(confidence)[:num_tokens]] = True
    return chosen


def choose_tempered(
    confidence: FloatArray, num_tokens: int, temperature: float, numbers: FloatArray
) -> BoolArray:
    """`num_tokens` positions, or all, drawn without replacement from softmax(confidence / T).

    numbers: [n] random, in [0, 1). By Gumbel's trick: the surest after noise are such a draw.
    """
    tiny = np.finfo(np.float64).tiny
    noise = -np.log(-np.log(np.maximum(numbers, tiny)))
    return choose_surest(confidence / temperature + noise, num_tokens)


def choose_above(
    confidence: FloatArray, threshold: float, num_tokens: int | None = None
) -> BoolArray:
    """Choose the candidates at least as sure as `threshold`, and the surest in any case.

    Only the `num_tokens` surest are looked at (`None`: all).
    """
    chosen = confidence >= threshold
    if num_tokens is not None:
        chosen &= choose_surest(confidence, num_tokens)
    return chosen | choose_surest(confidence, 1)


def choose_by_factor(confidence: FloatArray, factor: float) -> BoolArray:
    """Choose the n surest for the greatest n with (n + 1) * (1 - confidence of the n-th) <= factor.

    The surest is chosen in any case (Fast-dLLM, section 3.3). Their released code also writes the
    last position if it is the only one to fail; this does not.
    """
    ordered = confidence[_descending(confidence)]
    bounds = 1 - factor / np.arange(2, len(ordered) + 2)
    is_below = ordered < bounds
    num_tokens = int(is_below.argmax()) if is_below.any() else len(ordered)
    return choose_surest(confidence, max(1, num_tokens))


def num_allowed(num_tokens: int, steps: int, step: int, num_written: int) -> int:
    """Tokens that `confidence_threshold` may write in a step where `steps` bound it, 1 at least.

    As in Fast-dLLM's decoder of Dream: what earlier steps have left of their even share is
    allowed besides; after the last step, all that is left.
    """
    share, rest = divmod(num_tokens, steps)
    num_due = num_tokens if step >= steps else share * (step + 1) + min(rest, step + 1)
    return max(1, num_due - num_written)


def _descending(confidence: FloatArray) -> IntArray:
    """Indices [n] from the surest on; the sort is stable, so of equals the lower comes first."""
    return np.argsort(-confidence, kind="stable")
