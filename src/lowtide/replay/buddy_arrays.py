"""A buddy profile as arrays of a calibration's file; a curve that was not measured is empty."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.core import FloatArray, WeightArray
from lowtide.errors import UsageError
from lowtide.files.array_file import Arrays, Contradiction, facts_array, read_facts
from lowtide.policies.buddy_profile import BuddyProfile, QualityCurve

PREFIX = "buddy_"
BUDDY_DTYPES = {
    PREFIX + name: dtype
    for name, dtype in {
        "facts": "|u1",
        "activations": "<i8",
        "together": "<i4",
        "sample": "<f4",
        "curve": "<f8",
    }.items()
}
"""Arrays of a stored profile and their types."""

BUDDY_CHOICES = tuple(
    {PREFIX + name: dtype}
    for name, dtype in (("weighted", "<i8"), ("temperature", "<f8"), ("alphas", "<f8"))
)
"""Arrays that are stored where `calibrate` was asked for them, each by itself."""

_FACTS = {"fingerprint": str, "num_tokens": int, "curve_text_sha256": str}


def arrays_of(profile: BuddyProfile) -> dict[str, Any]:
    """Return a profile as the arrays of `BUDDY_DTYPES`."""
    curve = profile.curve
    facts = {
        "fingerprint": profile.fingerprint,
        "num_tokens": profile.num_tokens,
        "curve_text_sha256": "" if curve is None else curve.text_sha256,
    }
    points = np.empty((2, 0)) if curve is None else np.stack([curve.mass, curve.kl])
    arrays = {
        "facts": facts_array(facts),
        "activations": profile.activations,
        "together": profile.together.astype(np.int32),
        "sample": profile.sample,
        "curve": points,
    }
    if profile.weighted is not None:
        arrays["weighted"] = profile.weighted
    if profile.temperature != 1:
        arrays["temperature"] = np.array([profile.temperature])
    if profile.alphas is not None:
        arrays["alphas"] = profile.alphas
    return {PREFIX + name: np.ascontiguousarray(array) for name, array in arrays.items()}


def profile_of(arrays: Arrays) -> BuddyProfile:
    """Rebuild the profile from `arrays_of`; raise Contradiction."""
    own = {name.removeprefix(PREFIX): arrays[name] for name in BUDDY_DTYPES}
    chosen = {
        name.removeprefix(PREFIX): arrays[name]
        for one in BUDDY_CHOICES
        for name in one
        if name in arrays
    }
    facts = read_facts(own["facts"], _FACTS, "its buddies'")
    try:
        return BuddyProfile(
            fingerprint=facts["fingerprint"],
            num_tokens=facts["num_tokens"],
            activations=own["activations"],
            together=own["together"].astype(np.int64),
            sample=_checked_sample(own["sample"]),
            curve=_curve(own["curve"], facts["curve_text_sha256"]),
            weighted=chosen.get("weighted"),
            temperature=_temperature(chosen.get("temperature")),
            alphas=chosen.get("alphas"),
        )
    except UsageError as reason:
        raise Contradiction(str(reason).rstrip(".")) from None


def _checked_sample(sample: WeightArray) -> WeightArray:
    """Return weights after checking that they descend and sum to 1."""
    is_share = sample.ndim == 3 and np.isfinite(sample).all() and (sample >= 0).all()
    if not is_share or (np.diff(sample, axis=2) > 0).any():
        raise Contradiction("its sample of weights has values that cannot be")
    if not np.allclose(sample.sum(axis=2), 1, atol=1e-3):
        raise Contradiction("its sample of weights does not sum to 1")
    return sample


def _temperature(stored: FloatArray | None) -> float:
    if stored is None:
        return 1.0
    if stored.shape != (1,):
        raise Contradiction(f"its temperature has shape {stored.shape}")
    return float(stored[0])


def _curve(points: NDArray[Any], text_sha256: str) -> QualityCurve | None:
    if points.ndim != 2 or len(points) != 2:
        raise Contradiction(f"its quality curve has shape {points.shape}")
    if not points.shape[1]:
        return None
    return QualityCurve(points[0].copy(), points[1].copy(), text_sha256)
