"""Rules that choose which masked positions a step of masked diffusion writes.

Pure functions of numpy arrays over the positions that may still change, ascending. `confidence` is
float64 [n]; the result, bool [n], is true for written positions. Of equal confidences the lower
position comes first. Masks are known by position, never by "equal to the mask id".

Sources: fixed counts are from LLaDA's `generate`; the decreasing share, its independent draws and
its tempered choice from Dream's `diffusion_generate`; threshold and factor from Fast-dLLM.
"""

from __future__ import annotations

import numpy as np

from lowtide.core import BoolArray, FloatArray, IntArray


def num_by_share(num_masked: int, times: FloatArray, step: int) -> int:
    """Return the number of tokens that step `step` (from 0) of Dream's schedule writes.

    times: float32 [steps + 1], falling from 1 to `eps`. Of the tokens masked at time t, the share s
    / t stays masked at the next time s; the last step writes all. In float32, because its rounding
    decides where the product is almost whole.
    """
    if step >= len(times) - 2:
        return num_masked
    return int(np.float32(num_masked) * written_share(times, step))


def written_share(times: FloatArray, step: int) -> np.float32:
    """Return the probability with which `origin` writes a masked position; 1 in the last step."""
    if step >= len(times) - 2:
        return np.float32(1)
    share: np.float32 = np.float32(1) - np.float32(times[step + 1]) / np.float32(times[step])
    return share


def choose_surest(confidence: FloatArray, num_tokens: int) -> BoolArray:
    """Choose the `num_tokens` most confident positions, or all if there are fewer."""
    chosen = np.zeros(len(confidence), np.bool_)
    chosen[_descending(confidence)[:num_tokens]] = True
    return chosen


def choose_tempered(
    confidence: FloatArray, num_tokens: int, temperature: float, numbers: FloatArray
) -> BoolArray:
    """Draw `num_tokens` positions, or all, without replacement from softmax(confidence / T).

    numbers: random, [n] in [0, 1). Gumbel's trick: the most confident after adding noise are such a
    draw.
    """
    tiny = np.finfo(np.float64).tiny
    noise = -np.log(-np.log(np.maximum(numbers, tiny)))
    return choose_surest(confidence / temperature + noise, num_tokens)


def choose_above(
    confidence: FloatArray, threshold: float, num_tokens: int | None = None
) -> BoolArray:
    """Choose candidates with at least confidence `threshold`, and always the most confident.

    num_tokens: only this many of the most confident are considered; None: all.
    """
    chosen = confidence >= threshold
    if num_tokens is not None:
        chosen &= choose_surest(confidence, num_tokens)
    return chosen | choose_surest(confidence, 1)


def choose_by_factor(confidence: FloatArray, factor: float) -> BoolArray:
    """Choose the n most confident, for the largest n with (n + 1) * (1 - confidence_n) <= factor.

    The most confident is always chosen (Fast-dLLM, section 3.3). Their released code also writes
    the last position if only that one fails; this does not.
    """
    ordered = confidence[_descending(confidence)]
    bounds = 1 - factor / np.arange(2, len(ordered) + 2)
    is_below = ordered < bounds
    num_tokens = int(is_below.argmax()) if is_below.any() else len(ordered)
    return choose_surest(confidence, max(1, num_tokens))


def num_allowed(num_tokens: int, steps: int, step: int, num_written: int) -> int:
    """Return the most tokens, at least 1, that `confidence_threshold` may write in a step.

    As in Fast-dLLM's decoder of Dream: `steps` give each step an even share, and tokens that
    earlier steps left of theirs are added; after the last step, everything left is allowed.
    """
    share, rest = divmod(num_tokens, steps)
    num_due = num_tokens if step >= steps else share * (step + 1) + min(rest, step + 1)
    return max(1, num_due - num_written)


def _descending(confidence: FloatArray) -> IntArray:
    """Return indices [n] by falling confidence; a stable sort keeps the lower of equals first."""
    return np.argsort(-confidence, kind="stable")
