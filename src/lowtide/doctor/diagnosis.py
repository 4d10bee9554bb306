"""Result of `lowtide doctor`: the machine, its rates, and the costs of experts on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lowtide.core import MoEShape
from lowtide.hardware.machine import Machine, Rate
from lowtide.hardware.measure import Point
from lowtide.hardware.store import Stored
from lowtide.hardware.timing import Timing


class ExpertCosts(NamedTuple):
    """Costs of one model's experts on this machine."""

    name: str
    shape: MoEShape
    dtype: str
    dense_bytes: int  # of one layer
    device: str  # "" where there is none
    stored: Stored


class Skipped(NamedTuple):
    """A measurement that was skipped, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The machine, its rates, and the costs of experts on it."""

    machine: Machine
    rates: tuple[Rate, ...]
    costs: tuple[ExpertCosts, ...]
    skipped: tuple[Skipped, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints: seconds, bytes and rates per second."""
        return {
            "machine": asdict(self.machine),
            "rates": [rate._asdict() for rate in self.rates],
            "costs": [_as_dict(costs) for costs in self.costs],
            "skipped": [skipped._asdict() for skipped in self.skipped],
        }


def _as_dict(costs: ExpertCosts) -> dict[str, Any]:
    measurements = costs.stored.measurements
    curves = {name: getattr(measurements, name) for name in ("host", "dense", "device")}
    timings = {name: getattr(measurements, name) for name in ("link", "sync", "disk_read")}
    return {
        "name": costs.name,
        **costs.shape._asdict(),
        "dtype": costs.dtype,
        "expert_bytes": measurements.expert_bytes,
        "dense_bytes": costs.dense_bytes,
        "device": costs.device,
        "date": costs.stored.date,
        "spread": measurements.spread,
        "is_read_direct": measurements.is_read_direct,
        **{name: [_point(point) for point in curve] for name, curve in curves.items()},
        **{name: timing and _timing(timing) for name, timing in timings.items()},
    }


def _point(point: Point) -> dict[str, Any]:
    return {"num_tokens": point.num_tokens, **_timing(point.timing)}


def _timing(timing: Timing) -> dict[str, Any]:
    return {**timing._asdict(), "spread": timing.spread}
