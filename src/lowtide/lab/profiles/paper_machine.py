"""A paper's machine as its figures show it: measured or fitted curves of one expert, by its size.

Nothing from a data sheet is mixed in. `source` names what a curve was fitted to; results it was
fitted to do not count as reproduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lowtide.core import Costs, Curve, MoEShape
from lowtide.errors import UsageError
from lowtide.files.json_file import shown

EXPERTS = "expert"
"""Name of the table that marks a profile of this kind."""

MOST = 1e9
"""Upper bound of all values."""

_LEAST_MS = 1e-9
_MOST_POINTS = 64
_KEYS = {"name", "source", "weight_bytes", "device_memory_GB", "host_memory_GB", EXPERTS, "layer"}
_CURVES = ("host_ms", "device_ms")

Points = tuple[tuple[float, float], ...]  # (tokens, seconds)


@dataclass(frozen=True, slots=True)
class ExpertCurves:
    """Seconds of one expert with a given number of weights."""

    num_weights: int
    link_s: float
    host_s: Points
    device_s: Points

    def scaled(self, num_weights: int) -> ExpertCurves:
        """Return the curves of another size, in proportion."""
        factor = num_weights / self.num_weights
        host, device = (tuple((n, factor * s) for n, s in p) for p in (self.host_s, self.device_s))
        return ExpertCurves(num_weights, factor * self.link_s, host, device)

    def mixed(self, other: ExpertCurves, num_weights: int) -> ExpertCurves:
        """Return the curves of a size between two, by linear interpolation."""
        share = (num_weights - self.num_weights) / (other.num_weights - self.num_weights)
        return ExpertCurves(
            num_weights,
            (1 - share) * self.link_s + share * other.link_s,
            _mixed(self.host_s, other.host_s, share),
            _mixed(self.device_s, other.device_s, share),
        )


@dataclass(frozen=True, slots=True)
class PaperMachine:
    """Experts by size, ascending, and the seconds of a layer's other work on the device."""

    name: str
    source: str
    weight_bytes: float  # per weight, as the paper ran its models
    device_memory_bytes: float
    host_memory_bytes: float
    experts: tuple[ExpertCurves, ...]
    dense_s: Curve
    sync_s: float

    def costs(self, shape: MoEShape, weight_bytes: float | None = None) -> Costs:
        """Return the costs of a model's experts on this machine.

        They are interpolated between the two curves of the nearest sizes, and in proportion beyond
        them. weight_bytes: bytes per weight that moves, if not as the paper ran it; time is by
        weights.
        """
        num_weights = 3 * shape.hidden_size * shape.expert_size
        curves = self._curves(num_weights)
        return Costs(
            expert_bytes=round(num_weights * (weight_bytes or self.weight_bytes)),
            link_s=curves.link_s,
            host_s=Curve(curves.host_s),
            device_s=Curve(curves.device_s),
            dense_s=self.dense_s,
            sync_s=self.sync_s,
        )

    def _curves(self, num_weights: int) -> ExpertCurves:
        if num_weights <= self.experts[0].num_weights:
            return self.experts[0].scaled(num_weights)
        for smaller, larger in pairwise(self.experts):
            if num_weights <= larger.num_weights:
                return smaller.mixed(larger, num_weights)
        return self.experts[-1].scaled(num_weights)


def parse_paper_machine(table: Mapping[str, Any], source: str) -> PaperMachine:
    """Parse a TOML table; raise UsageError naming what is missing or invalid."""
    if set(table) != _KEYS:
        missing, strays = sorted(_KEYS - set(table)), sorted(set(table) - _KEYS)
        raise UsageError(
            f"Profile {source} has measured curves (expert) and then needs exactly "
            f"{', '.join(sorted(_KEYS))}: missing {', '.join(missing) or 'none'}, not of its kind "
            f"{', '.join(strays) or 'none'}; curves and data sheets are not mixed."
        )
    for key in ("name", "source"):
        if not isinstance(table[key], str) or not table[key].strip():
            raise UsageError(f"Profile {source}: {key} must be a text that is not empty.")
    layer = checked_table(table["layer"], ("dense_ms", "sync_ms"), "layer", source)
    rows = table[EXPERTS]
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"Profile {source}: expert must be one or more tables of curves.")
    experts = tuple(_expert(row, source) for row in rows)
    if any(a.num_weights >= b.num_weights for a, b in pairwise(experts)):
        raise UsageError(f"Profile {source}: experts must ascend by num_weights.")
    return PaperMachine(
        table["name"],
        table["source"],
        checked_number(table["weight_bytes"], "weight_bytes", source),
        1e9 * checked_number(table["device_memory_GB"], "device_memory_GB", source),
        1e9 * checked_number(table["host_memory_GB"], "host_memory_GB", source),
        experts,
        Curve(_points(layer["dense_ms"], "layer.dense_ms", source)),
        1e-3 * checked_number(layer["sync_ms"], "layer.sync_ms", source),
    )


def _expert(row: Any, source: str) -> ExpertCurves:
    row = checked_table(row, ("num_weights", "link_ms", *_CURVES), EXPERTS, source)
    num_weights = row["num_weights"]
    if type(num_weights) is not int or not 1 <= num_weights <= MOST:
        raise UsageError(
            f"Profile {source}: num_weights must be a whole number from 1 to {MOST:g}."
        )
    link_s = 1e-3 * checked_number(row["link_ms"], "expert.link_ms", source)
    host_s, device_s = (_points(row[name], f"expert.{name}", source) for name in _CURVES)
    return ExpertCurves(num_weights, link_s, host_s, device_s)


def checked_table(value: Any, keys: Sequence[str], name: str, source: str) -> dict[str, Any]:
    """Return a profile's table after checking its keys. Raise UsageError."""
    if not isinstance(value, dict):
        raise UsageError(f"Profile {source}: {name} must be a table of {', '.join(keys)}.")
    missing = [key for key in keys if key not in value]
    strays = [key for key in value if key not in keys]
    if missing or strays:
        raise UsageError(
            f"Profile {source}: {name} needs exactly {', '.join(keys)}; missing "
            f"{', '.join(missing) or 'none'}, unknown {', '.join(strays) or 'none'}."
        )
    return value


def _points(value: Any, name: str, source: str) -> Points:
    """Parse pairs of tokens and milliseconds."""
    is_list = isinstance(value, list) and 1 <= len(value) <= _MOST_POINTS
    if not is_list or not all(isinstance(one, list) and len(one) == 2 for one in value):
        raise UsageError(
            f"Profile {source}: {name} must be 1 to {_MOST_POINTS} pairs of tokens and "
            "milliseconds."
        )
    points = [
        (checked_number(n, name, source), 1e-3 * checked_number(ms, name, source))
        for n, ms in value
    ]
    is_curve = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
    if points[0][0] < 1 or not is_curve:
        raise UsageError(
            f"Profile {source}: {name} must have ascending tokens from 1 and times that do not "
            "fall."
        )
    return tuple(points)


def checked_number(
    value: Any, name: str, source: str, least: float = _LEAST_MS, most: float = MOST
) -> float:
    """Return a profile's number. Raise UsageError unless it is from `least` to `most`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise UsageError(
            f"Profile {source}: {name} must be from {least:g} to {most:g}, not {shown(value)}."
        )
    return float(value)


def _mixed(first: Points, second: Points, share: float) -> Points:
    counts = sorted({int(n) for n, _ in (*first, *second)})
    counts.append(2 * counts[-1])  # beyond its points a curve goes on as its last two have it
    one, other = Curve(first), Curve(second)
    return tuple((n, (1 - share) * one.at(n) + share * other.at(n)) for n in counts)
