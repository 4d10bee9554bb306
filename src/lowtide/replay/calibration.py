"""A calibration: facts about a model's routing on a text, as `calibrate` stores them.

    calibration = Calibration.load(path)
    calibration.check(config.architecture, TraceShape(*config.moe_shape))
    calibration.residual, calibration.frequency, calibration.following

The file is read without trust, as traces are. Stores these numbers, and does not know how they
are made.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import FloatArray
from lowtide.errors import UsageError
from lowtide.files.array_file import (
    Arrays,
    Contradiction,
    check_values,
    facts_array,
    holds_arrays,
    load_arrays,
    made_again,
    read_facts,
    save_arrays,
)
from lowtide.files.folders import cache_folder
from lowtide.files.whole_file import check_writable
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.policies.buddy_profile import BuddyProfile, QualityCurve
from lowtide.replay.buddy_arrays import BUDDY_CHOICES, BUDDY_DTYPES, arrays_of, profile_of
from lowtide.replay.input_arrays import INPUT_DTYPES, arrays_of_inputs, inputs_of
from lowtide.replay.trace import (
    MAX_TRACE_BYTES,
    TRACE_DTYPES,
    TRACE_VERSION,
    Trace,
    TraceShape,
    trace_of,
)

CALIBRATION_VERSION = 1
GATES = ("raw", "residual")
"""Early gates that are judged: the first axis of `GateAccuracy`."""
TOP_SIZES = (1, 2, 4, 8)
"""Numbers of experts that a prefetch might name."""

_FACTS = dict.fromkeys(("architecture", "text_sha256", "date"), str)
_PREFIX = "trace_"
_SHAPE = _PREFIX + "shape"
_COSINE_SLACK = 1e-6  # what rounding may add to a cosine
_DTYPES = {
    **{_PREFIX + name: dtype for name, dtype in TRACE_DTYPES.items()},
    "version": "<i8",
    "facts": "|u1",
    "residual": "<f4",
    "frequency": "<f8",
    "following": "<f8",
    "routed": "<f8",
    "top": "<f8",
    "cosine": "<f8",
}
_VERSIONS = {"version": CALIBRATION_VERSION, _PREFIX + "version": TRACE_VERSION}
_MAKER = "lowtide calibrate"


def is_calibration(file: IO[bytes]) -> bool:
    """Return True if a file is a calibration of any version."""
    return holds_arrays(file, "version", "facts", "frequency", "following")


class GateAccuracy(NamedTuple):
    """Accuracy of the next layer's gate, run one layer early, at predicting that layer's demand.

    Means over a text that was not calibrated on. First axis: `GATES`; second: the layers after the
    first.
    """

    routed: FloatArray  # [2, layers - 1] share of each token's experts that were predicted
    # [2, layers - 1, 4] for each n of TOP_SIZES: of the n experts predicted to have most tokens in
    # a pass, the share that was among the n that did (DALI's accuracy)
    top: FloatArray
    cosine: FloatArray  # [2, layers - 1] of the features used and the true ones


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A model's routing on one text."""

    architecture: str  # as published: "LLaDA2MoeModelLM"
    text_sha256: str
    date: str  # ISO 8601
    trace: Trace
    # [layers - 1, hidden]: mean of the next MoE layer's gate input less this one's (DALI, Eq. 10)
    residual: NDArray[np.float32]
    frequency: FloatArray  # [layers, experts]: passes in which each expert was activated
    # [layers - 1, experts, experts]: how often a token's expert was followed by each
    following: FloatArray
    accuracy: GateAccuracy
    buddies: BuddyProfile | None = None  # where it was asked for
    inputs: ExpertInputs | None = None  # where they were asked for

    @property
    def shape(self) -> TraceShape:
        return self.trace.shape

    def check(self, architecture: str, shape: TraceShape) -> None:
        """Raise UsageError if this is another model's calibration."""
        _check_model((self.architecture, self.shape), (architecture, shape))

    def with_curve(self, curve: QualityCurve) -> Calibration:
        """Return the calibration with this curve of its buddies, replacing an older one.

        Raises UsageError if it has no buddies.
        """
        if self.buddies is None:
            raise UsageError(
                "A quality curve is of a buddy profile, and this calibration has none; run lowtide "
                "calibrate --buddies."
            )
        return replace(self, buddies=replace(self.buddies, curve=curve))

    def save(self, path: Path) -> None:
        """Write it atomically, creating its folder. Raise StorageError."""
        check_writable(path, "calibration", is_calibration)
        facts = {name: getattr(self, name) for name in _FACTS}
        arrays = {
            **{_PREFIX + name: array for name, array in self.trace.arrays().items()},
            "version": np.array([CALIBRATION_VERSION], np.int64),
            "facts": facts_array(facts),
            "residual": self.residual,
            "frequency": self.frequency,
            "following": self.following,
            **self.accuracy._asdict(),
            **({} if self.buddies is None else arrays_of(self.buddies)),
            **({} if self.inputs is None else arrays_of_inputs(self.inputs)),
        }
        save_arrays(path, arrays, "calibration", is_calibration)

    @classmethod
    def load(cls, path: Path, has_inputs: bool = True) -> Calibration:
        """Read a calibration that `save` wrote.

        has_inputs: include the experts' inputs; without them the calibration must not be saved over
        the file. Raises UsageError for another or contradictory file, StorageError if it cannot be
        read.
        """
        arrays = _load(path, () if has_inputs else INPUT_DTYPES)
        with _no_contradiction(path):
            return _build(arrays)


def load_inputs(path: Path, architecture: str, shape: TraceShape) -> ExpertInputs | None:
    """Load only the experts' inputs of a model's calibration; None if it has none.

    Raises the errors of `Calibration.load` and `check`.
    """
    wanted = {*INPUT_DTYPES, "facts", _SHAPE}
    of_buddies = {name for some in (BUDDY_DTYPES, *BUDDY_CHOICES) for name in some}
    arrays = _load(path, ({*_DTYPES} | of_buddies) - wanted)
    with _no_contradiction(path):
        found = arrays[_SHAPE]
        if found.shape != (len(shape),):
            raise Contradiction(f"its trace's shape has {found.size} numbers")
        facts = read_facts(arrays["facts"], _FACTS, "its")
        of_file = (facts["architecture"], TraceShape(*found.tolist()))
        _check_model(of_file, (architecture, shape))
        return _inputs(arrays, shape)


def default_path(folder: Path, architecture: str, shape: TraceShape) -> Path:
    """Return the default path of the calibration of the model in `folder`.

    It is in the user's cache; the name has a digest of the folder and of what `check` compares.
    Raises StorageError without a home folder.
    """
    facts = json.dumps([str(folder.resolve()), architecture, *shape])
    digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", folder.resolve().name)[:64]
    return cache_folder() / "calibrations" / f"{name}-{digest}.lowtide"


def _load(path: Path, unread: Collection[str]) -> Arrays:
    optional = (BUDDY_DTYPES, *BUDDY_CHOICES, INPUT_DTYPES)
    return load_arrays(
        path, _DTYPES, MAX_TRACE_BYTES, "calibration", _MAKER, _VERSIONS, optional, unread
    )


@contextmanager
def _no_contradiction(path: Path) -> Iterator[None]:
    """Convert Contradiction to a UsageError that names the file."""
    try:
        yield
    except Contradiction as reason:
        told = f"Calibration {path} contradicts itself: {reason}"
        raise UsageError(f"{told}; {made_again(_MAKER)}.") from None


def _check_model(found: tuple[str, TraceShape], wanted: tuple[str, TraceShape]) -> None:
    """Raise UsageError if architecture or shape of two models differ."""
    if found != wanted:
        raise UsageError(
            f"The calibration is another model's: {_described(*found)}, and this is "
            f"{_described(*wanted)}; run lowtide calibrate on this one."
        )


def _build(arrays: Arrays) -> Calibration:
    trace = trace_of({name: arrays[_PREFIX + name] for name in TRACE_DTYPES})
    layers, experts, _, hidden, _ = trace.shape
    check_values(arrays["residual"], "residual", (layers - 1, hidden), -np.inf, np.inf)
    check_values(arrays["frequency"], "frequency", (layers, experts), 0, np.inf)
    check_values(arrays["following"], "following", (layers - 1, experts, experts), 0, np.inf)
    check_values(arrays["routed"], "routed", (len(GATES), layers - 1), 0, 1)
    check_values(arrays["top"], "top", (len(GATES), layers - 1, len(TOP_SIZES)), 0, 1)
    most = 1 + _COSINE_SLACK
    check_values(arrays["cosine"], "cosine", (len(GATES), layers - 1), -most, most)
    return Calibration(
        **read_facts(arrays["facts"], _FACTS, "its"),
        trace=trace,
        residual=arrays["residual"],
        frequency=arrays["frequency"],
        following=arrays["following"],
        accuracy=GateAccuracy(arrays["routed"], arrays["top"], arrays["cosine"]),
        buddies=_buddies(arrays, trace.shape),
        inputs=_inputs(arrays, trace.shape),
    )


def _buddies(arrays: Arrays, shape: TraceShape) -> BuddyProfile | None:
    if not set(BUDDY_DTYPES) <= set(arrays):
        return None
    profile = profile_of(arrays)
    of_profile = (profile.num_layers, profile.num_experts, profile.num_experts_per_token)
    if of_profile != shape[:3]:
        raise Contradiction(f"its buddies are of {of_profile}, its trace of {shape[:3]}")
    return profile


def _inputs(arrays: Arrays, shape: TraceShape) -> ExpertInputs | None:
    if not set(INPUT_DTYPES) <= set(arrays):
        return None
    layers, experts, _, hidden, width = shape
    return inputs_of(arrays, layers, experts, (hidden, width))


def _described(architecture: str, shape: TraceShape) -> str:
    layers, experts, k, hidden, width = shape
    return (
        f"{architecture!r} with {layers} MoE layers of {experts} experts, {k} per token, hidden "
        f"size {hidden}, expert size {width}"
    )
