"""Stores a model's speeds here: layers measured at its first load, and its last runs.

One JSON file for each model, format and machine below the user's cache folder, at most 64. A file
that is torn, of another version or foreign is ignored, and the speeds are measured again.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.core import Curve
from lowtide.errors import CheckpointError, StorageError
from lowtide.files.folders import cache_folder
from lowtide.hardware.machine import Machine
from lowtide.hardware.store import digest, read_kept, write_kept
from lowtide.version import __version__

METHOD = 1
"""Version of the measurements; increased to discard stored files."""

MAX_FILES = 64
MAX_RUNS = 4
MAX_POINTS = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SpeedKey:
    """Identity of stored speeds; if any part differs, the model is measured again."""

    machine: Machine
    model: str  # the folder or file that it is read from
    config: str  # a digest of what the model is
    dtype: str
    formats: str  # of the weights in memory
    kernels: str
    kv_cache: str

    @property
    def path(self) -> Path:
        """The path of its file, which may not exist.

        Raises StorageError if there is no cache folder.
        """
        return cache_folder() / "speeds" / f"{digest(self._identity())}.json"

    def _identity(self) -> dict[str, Any]:
        return {"version": __version__, "method": METHOD, **asdict(self)}


class OwnRun(NamedTuple):
    """Averages of a run's passes that wrote tokens."""

    num_residents: int  # experts that the plan kept in memory
    num_passes: int
    num_rows: float  # of a pass
    num_tokens: float  # that a pass committed
    compute_s: float  # of a pass, waiting left out
    wait_s: float  # for experts, in a pass
    num_missed: float  # experts that a pass asked for and memory did not have

    @property
    def pass_s(self) -> float:
        return self.compute_s + self.wait_s

    def is_of(self, num_residents: int, num_rows: float) -> bool:
        """Return True if its passes had as many residents and about as many rows."""
        return self.num_residents == num_residents and round(self.num_rows) == round(num_rows)


@dataclass(frozen=True, slots=True)
class ModelSpeeds:
    """Known speeds of a model on this machine.

    passes: rows -> seconds of a pass with every expert in memory.
    reads: number of experts read together -> seconds.
    rounding_s: of one expert on one core, if weights are rounded when read.
    runs: newest first, each at another number of residents.
    """

    passes: tuple[tuple[int, float], ...] = ()
    reads: tuple[tuple[int, float], ...] = ()
    rounding_s: float | None = None
    runs: tuple[OwnRun, ...] = field(default=())

    @property
    def pass_s(self) -> Curve | None:
        """Curve of `passes`; None if nothing was measured."""
        return Curve(self.passes) if self.passes else None

    @property
    def reads_s(self) -> Curve | None:
        """Curve of `reads`; None if nothing was measured."""
        return Curve(self.reads) if self.reads else None

    def run_like(self, num_residents: int) -> OwnRun | None:
        """Return the last run with this number of residents, else the last of all."""
        same = [run for run in self.runs if run.num_residents == num_residents]
        return next(iter([*same, *self.runs]), None)

    def having_run(self, run: OwnRun) -> ModelSpeeds:
        """Put a run first, replacing the one with as many residents."""
        others = [each for each in self.runs if each.num_residents != run.num_residents]
        return replace(self, runs=(run, *others)[:MAX_RUNS])


def kept_speeds(key: SpeedKey) -> ModelSpeeds:
    """Return a model's stored speeds; empty if it never ran here or the file is damaged."""
    try:
        path = key.path
        if not os.path.lexists(path):
            return ModelSpeeds()
        return _read(read_kept(path, key._identity()))
    except (CheckpointError, StorageError) as error:
        _log.debug("%s The model's speed is measured again.", error)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        _log.debug("%s holds no speeds: %s. They are measured again.", path, error)
    return ModelSpeeds()


def keep_speeds(key: SpeedKey, change: Callable[[ModelSpeeds], ModelSpeeds]) -> None:
    """Replace the stored speeds by `change` of them, atomically; log a failure."""
    speeds = change(kept_speeds(key))
    runs = [run._asdict() for run in speeds.runs]
    try:
        _drop_oldest(key.path)
        write_kept(key.path, key._identity(), {**asdict(speeds), "runs": runs}, "speeds")
    except StorageError as error:
        _log.warning("%s The measured speed holds for this run only.", error)


def _drop_oldest(path: Path) -> None:
    """Remove the oldest files until one at `path` is within `MAX_FILES`."""
    with suppress(OSError):
        others = [each for each in path.parent.glob("*.json") if each != path]
        by_age = sorted(others, key=lambda each: each.stat().st_mtime, reverse=True)
        for each in by_age[MAX_FILES - 1 :]:
            each.unlink()


def _read(content: Any) -> ModelSpeeds:
    """Parse stored speeds. Raise ValueError, KeyError or TypeError for anything else."""
    runs = tuple(_read_run(value) for value in _few(content["runs"], MAX_RUNS))
    rounding_s = content["rounding_s"]
    speeds = ModelSpeeds(
        passes=_read_points(content["passes"]),
        reads=_read_points(content["reads"]),
        rounding_s=None if rounding_s is None else _positive(rounding_s),
        runs=runs,
    )
    _ = speeds.pass_s, speeds.reads_s  # points out of order
    return speeds


def _read_points(value: Any) -> tuple[tuple[int, float], ...]:
    return tuple((_count(count), _positive(seconds)) for count, seconds in _few(value, MAX_POINTS))


def _read_run(value: Any) -> OwnRun:
    run = OwnRun(**value)
    for count in (run.num_residents, run.num_passes):
        if type(count) is not int or not 0 <= count < 1 << 31:
            raise ValueError(f"{count!r} is not a count")
    for number in (run.num_rows, run.num_tokens, run.compute_s):
        _positive(number)
    for number in (run.wait_s, run.num_missed):
        if number != 0:
            _positive(number)
    return run


def _few(value: Any, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{value!r:.80} is not a short list")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r:.80} is not a time or share")
    return float(value)
