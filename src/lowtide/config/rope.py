"""The rotary embedding's numbers: flat keys or, since transformers 5, nested ones."""

from __future__ import annotations

import math
from typing import NamedTuple

from lowtide.config.fields import MAX_HEADS, MAX_POSITIONS, Fields
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.files.json_file import shown


class Yarn(NamedTuple):
    """Rotary frequencies stretched over a longer context (YaRN, arXiv 2309.00071, section 3).

    Dimensions that turn more than `beta_fast` times in `original_positions` keep their frequency,
    those that turn less than `beta_slow` times have it divided by `factor`, the others lie
    between: the ends of that ramp are whole pairs if it `is_rounded`. Cosines and sines are
    multiplied by `amplitude`.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    amplitude: float
    is_rounded: bool = True


class Rope(NamedTuple):
    """What `config.json` says of the rotary embedding."""

    theta: float
    rotary_dim: int  # leading dimensions that rotate
    yarn: Yarn | None = None
    mscale_all_dim: float = 0.0  # YaRN of DeepSeek: the softmax scale grows too, see `mscale`


def mscale(factor: float, weight: float) -> float:
    """YaRN's growth of attention for a context `factor` times longer: 0.1 weight ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_rope(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    can_yarn: bool = False,
    can_be_partial: bool = False,
) -> Rope:
    """Of a family that rotates heads of `head_dim`.

    With `can_yarn` it may be stretched, with `can_be_partial` some dimensions may stay as they are.
    """
    said = [
        _Said(
            fields.optional_number("rope_theta", low=1.0, high=1e15),
            fields.optional_number("partial_rotary_factor", low=0.0, high=1.0),
        )
    ]
    for name in ("rope_parameters", "rope_scaling"):
        if (nested := fields.raw(name)) is not None:
            if not isinstance(nested, dict):
                raise fields.error(name, "must be an object")
            said.append(_nested(Fields(nested, f"{name}."), max_positions, can_yarn))
    theta = _agreed("rope_theta", [each.theta for each in said])
    if theta is None:
        raise ConfigError("config.json has no rope_theta, neither flat nor in rope_parameters.")
    stretches = [each.stretch for each in said if each.stretch is not None]
    if len(set(stretches)) > 1:
        raise ConfigError("config.json: rope_parameters and rope_scaling disagree.")
    yarn, mscale_all_dim = stretches[0] if stretches else (None, 0.0)
    factor = _agreed("partial_rotary_factor", [each.factor for each in said])
    rotary_dim = _rotary_dim(fields, head_dim, factor)
    if rotary_dim != head_dim and not can_be_partial:
        raise UnsupportedError(
            f"config.json: {rotary_dim} of {head_dim} dimensions rotate (partial_rotary_factor, "
            "rotary_dim); in this family all do."
        )
    return Rope(theta, rotary_dim, yarn, mscale_all_dim)


class _Said(NamedTuple):
    """What one place of the file says; None where it says nothing."""

    theta: float | None
    factor: float | None  # of a head's dimensions, those that rotate
    stretch: tuple[Yarn, float] | None = None  # with `Rope.mscale_all_dim`


def _nested(inner: Fields, max_positions: int, can_yarn: bool) -> _Said:
    kind = inner.text("rope_type", "type", default="default")
    stretch = _yarn(inner, max_positions) if can_yarn and kind == "yarn" else None
    if stretch is None and kind != "default":
        also = " and 'yarn'" if can_yarn else ""
        raise UnsupportedError(
            f"config.json: {inner.prefix[:-1]}: the rotary embedding {shown(kind)} is not "
            f"supported, only 'default'{also}."
        )
    said = _Said(
        inner.optional_number("rope_theta", low=1.0, high=1e15),
        inner.optional_number("partial_rotary_factor", low=0.0, high=1.0),
        stretch,
    )
    _refuse_unknown(inner)
    return said


def _rotary_dim(fields: Fields, head_dim: int, factor: float | None) -> int:
    rotary_dim = fields.optional_integer("rotary_dim", low=2, high=MAX_HEADS)
    from_factor = None if factor is None else float(int(head_dim * factor))
    rotating = _agreed("rotary_dim (partial_rotary_factor * head_dim)", [rotary_dim, from_factor])
    return head_dim if rotating is None else int(rotating)


def _yarn(inner: Fields, max_positions: int) -> tuple[Yarn, float]:
    factor = inner.number("factor", low=1.0, high=1e6)
    own, everywhere = (
        inner.optional_number(name, low=0.0, high=100.0) for name in ("mscale", "mscale_all_dim")
    )
    amplitude = inner.optional_number("attention_factor", low=1e-3, high=1e3)
    if amplitude is None and own and everywhere:
        amplitude = mscale(factor, own) / mscale(factor, everywhere)
    yarn = Yarn(
        factor=factor,
        original_positions=inner.integer(
            "original_max_position_embeddings", low=1, high=MAX_POSITIONS, default=max_positions
        ),
        beta_fast=inner.optional_number("beta_fast", low=0.0, high=1e6) or 32.0,
        beta_slow=inner.optional_number("beta_slow", low=0.0, high=1e6) or 1.0,
        amplitude=mscale(factor, 1.0) if amplitude is None else amplitude,
        is_rounded=inner.boolean("truncate", default=True),
    )
    return yarn, everywhere or 0.0


def _refuse_unknown(inner: Fields) -> None:
    for name in inner.values:
        if name not in inner.asked and inner.values[name] is not None:
            raise UnsupportedError(
                f"config.json: {inner.prefix}{shown(name)} is not supported; only the default "
                "rotary embedding is."
            )


def _agreed(name: str, values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(set(known)) > 1:
        raise ConfigError(f"config.json gives {name} twice: {known[0]:g} and {known[-1]:g}.")
    return known[0] if known else None
