"""Stores measurements of this machine between runs.

One JSON file per machine for the rates of its parts, and one per machine and model shape for
experts' costs, below the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`). A file names its
subject, the machine, the time and the version. Emulated devices are not stored: their speeds are
options.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.core import Costs, MoEShape
from lowtide.errors import CheckpointError, StorageError
from lowtide.experts.layout import SlotLayout
from lowtide.files.folders import cache_folder
from lowtide.files.json_file import read_object
from lowtide.files.whole_file import whole_file
from lowtide.hardware.machine import RATES_METHOD, Machine, Rate
from lowtide.hardware.measure import METHOD, Measurements, Point
from lowtide.hardware.timing import Timing
from lowtide.kernels.reference import REFERENCE
from lowtide.version import __version__

MAX_FILE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CostKey:
    """Identity of a measurement; if any part differs, another one is needed."""

    machine: Machine
    hidden_size: int
    expert_size: int
    num_experts_per_token: int  # decides how many threads work side by side
    expert_bytes: int
    dtype: str
    dense_bytes: int
    device: str  # "" without one
    checkpoint: str  # the folder that experts are read from; "" when their home is host memory
    products: str  # the host's, by name

    @classmethod
    def of(
        cls,
        machine: Machine,
        shape: MoEShape,
        layout: SlotLayout,
        dense_bytes: int,
        device: str = "",
        checkpoint: Path | None = None,
        products: str = REFERENCE.name,
    ) -> CostKey:
        """Return the key of `measure_costs` with these arguments.

        device: its name, and the part of its state that may change.
        """
        return cls(
            machine=machine,
            hidden_size=shape.hidden_size,
            expert_size=shape.expert_size,
            num_experts_per_token=shape.num_experts_per_token,
            expert_bytes=layout.num_bytes,
            dtype=layout.describe(),
            dense_bytes=dense_bytes,
            device=device,
            checkpoint="" if checkpoint is None else str(checkpoint.resolve()),
            products=products,
        )

    @property
    def path(self) -> Path:
        """The path of its file, which may not exist."""
        name = f"{self.hidden_size}x{self.expert_size}-{self.dtype}-{digest(self._identity())}"
        return cache_folder() / "costs" / f"{name}.json"

    def _identity(self) -> dict[str, Any]:
        """Return the identity as stored.

        It includes the version, which may compute or measure otherwise.
        """
        return {"version": __version__, "method": METHOD, **asdict(self)}


class Stored(NamedTuple):
    """Costs and when they were measured, in UTC to the second."""

    measurements: Measurements
    date: str

    @property
    def costs(self) -> Costs:
        return self.measurements.costs()


def stored_or_measured(
    key: CostKey, measure: Callable[[], Measurements], *, is_fresh: bool = False
) -> Stored:
    """Return the costs stored under `key`; if there are none, measure and store them.

    is_fresh: measure in any case. A file that is damaged or cannot be written is logged, not an
    error. Raises as `measure` does.
    """
    stored = None
    if not is_fresh:
        try:
            stored = load(key)
        except StorageError as error:
            _log.warning("%s Measuring again.", error)
    if stored is None:
        stored = measured_now(measure())
        try:
            save(key, stored)
        except StorageError as error:
            _log.warning("%s The measured costs hold for this run only.", error)
    return stored


def measured_now(measurements: Measurements) -> Stored:
    """Add the present date to measurements."""
    return Stored(measurements, datetime.now(UTC).replace(microsecond=0).isoformat())


def load(key: CostKey) -> Stored | None:
    """Return the costs stored under `key`, or None.

    Raises StorageError for a file that cannot be read or has other contents.
    """
    path = key.path
    if not os.path.lexists(path):
        return None
    try:
        content = read_kept(path, key._identity())
        measurements = _read_measurements(content["measurements"], key.expert_bytes)
        return Stored(measurements, datetime.fromisoformat(content["date"]).isoformat())
    except CheckpointError as error:
        raise StorageError(str(error)) from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        told = f"{path} does not hold measured costs: {error}"
        raise StorageError(f"{told}; remove it, and they are measured again.") from error


def save(key: CostKey, stored: Stored) -> None:
    """Write the file atomically. Raise StorageError."""
    measured = {"date": stored.date, "measurements": asdict(stored.measurements)}
    write_kept(key.path, key._identity(), measured, "costs")


def keep_rates(machine: Machine, rates: Sequence[Rate]) -> None:
    """Write a machine's file atomically; log a failure.

    A disturbed rate is left out, so that the one stored before stays.
    """
    disturbed = {rate.name for rate in rates if rate.is_disturbed}
    before = [rate for rate in kept_rates(machine) if rate.name in disturbed] if disturbed else []
    kept = [*(rate for rate in rates if rate.name not in disturbed), *before]
    try:
        measured = {"rates": [rate._asdict() for rate in kept]}
        write_kept(rates_path(machine), _machine_identity(machine), measured, "rates")
    except StorageError as error:
        _log.warning("%s The measured rates are not kept.", error)


def kept_rates(machine: Machine) -> tuple[Rate, ...]:
    """Return a machine's stored rates; none if it was never measured.

    A damaged file is logged.
    """
    try:
        path = rates_path(machine)
    except StorageError:  # no home, so nothing was kept
        return ()
    if not os.path.lexists(path):
        return ()
    try:
        content = read_kept(path, _machine_identity(machine))
        rates = (_read_rate(value) for value in content["rates"])
        return tuple(rate for rate in rates if not rate.is_disturbed)
    except CheckpointError as error:  # which names the file
        _log.warning("%s It was to hold this machine's rates; lowtide doctor measures them.", error)
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("%s does not hold a machine's rates: %s.", path, error)
    return ()


def rates_path(machine: Machine) -> Path:
    """Return the path of a machine's file, which may not exist.

    Raises StorageError if there is no cache folder.
    """
    return cache_folder() / "rates" / f"{digest(_machine_identity(machine))}.json"


def _machine_identity(machine: Machine) -> dict[str, Any]:
    return {"version": __version__, "method": RATES_METHOD, **asdict(machine)}


def digest(identity: Mapping[str, Any]) -> str:
    """Return a file's name for its identity, 16 hexadecimal digits."""
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_kept(path: Path, identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read a file of `write_kept`.

    Raises CheckpointError, and ValueError for a file that is of something else.
    """
    content = read_object(
        path, MAX_FILE_BYTES, way_out="remove it, and its costs are measured again"
    )
    if content.get("of") != json.loads(json.dumps(identity)):
        raise ValueError("it is of another machine, model or version")
    return content


def write_kept(
    path: Path, identity: Mapping[str, Any], measured: Mapping[str, Any], what: str
) -> None:
    """Write measurements and their identity atomically. Raise StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        told = f"{path.parent} cannot be made: {error.strerror}"
        raise StorageError(f"{told}; XDG_CACHE_HOME names another cache folder.") from error
    # A pipe would wait for its reader. A path that cannot be looked at is told of by the writing.
    if os.path.exists(path) and not os.path.isfile(path):
        raise StorageError(f"{path} is not a regular file; remove it to keep measurements.")
    with whole_file(path, what) as file:
        file.write((json.dumps({"of": identity, **measured}, indent=1) + "\n").encode())


def _read_measurements(value: Mapping[str, Any], expert_bytes: int) -> Measurements:
    """Parse stored measurements. Raise ValueError, KeyError or TypeError for anything else."""
    if value["expert_bytes"] != expert_bytes or type(value["is_read_direct"]) is not bool:
        raise ValueError("the size of an expert or the kind of its reads is wrong")
    host, dense, device = (_read_curve(value[name]) for name in ("host", "dense", "device"))
    link, sync, read = (_read_optional(value[name]) for name in ("link", "sync", "disk_read"))
    is_direct = value["is_read_direct"]
    measurements = Measurements(expert_bytes, host, dense, device, link, sync, read, is_direct)
    measurements.costs()  # curves without points, or with points out of order
    return measurements


def _read_curve(value: Any) -> tuple[Point, ...]:
    return tuple(Point(_count(num_tokens), _read_timing(timing)) for num_tokens, timing in value)


def _read_optional(value: Any) -> Timing | None:
    return None if value is None else _read_timing(value)


def _read_timing(value: Any) -> Timing:
    median_s, least_s, most_s, num_repeats = value
    timing = Timing(_seconds(median_s), _seconds(least_s), _seconds(most_s), _count(num_repeats))
    if not timing.least_s <= timing.median_s <= timing.most_s:
        raise ValueError(f"the median {median_s} is not from {least_s} to {most_s}")
    return timing


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a time in seconds")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a count")
    return value


def _read_rate(value: Any) -> Rate:
    """Parse a stored rate. Raise ValueError or TypeError for anything else."""
    rate = Rate(**value)
    numbers = (rate.per_s, rate.spread, rate.ceiling)
    if not all(type(number) in (int, float) and 0 <= number < math.inf for number in numbers):
        raise ValueError(f"{value!r} is not a rate")
    if not rate.per_s or type(rate.name) is not str or type(rate.unit) is not str:
        raise ValueError(f"{value!r} is not a rate")
    return rate
