"""Parameters of the rotary embedding, from flat keys or (since transformers 5) nested ones."""

from __future__ import annotations

import math
from typing import NamedTuple

from lowtide.config.fields import MAX_HEADS, MAX_POSITIONS, OTHER_MODEL, Fields
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.files.json_file import shown

_LEAST_DIVISOR, _MOST_DIVISOR = 1e-6, 1e6
_LEAST_TURNS = 1e-6

_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys of positions in images; the three positions of a word are one, and rotate as usual."""


class Yarn(NamedTuple):
    """Rotary frequencies stretched over a longer context (YaRN, arXiv 2309.00071, section 3).

    Dimensions that turn more than `beta_fast` times in `original_positions` keep their frequency;
    below `beta_slow` turns it is divided by `factor`; between them lies a ramp, whose ends are
    rounded to whole pairs if it `is_rounded`. Cosines and sines are multiplied by `amplitude`.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    amplitude: float
    is_rounded: bool = True


class Rope(NamedTuple):
    """Parameters of the rotary embedding."""

    theta: float
    rotary_dim: int  # leading dimensions that rotate
    yarn: Yarn | None = None
    mscale_all_dim: float = 0.0  # YaRN of DeepSeek: the softmax scale grows too, see `mscale`
    divisors: tuple[float, ...] = ()  # of the frequencies: one for all, or one for each pair
    is_interleaved: bool = False  # dimension 2 i rotates with 2 i + 1, not with one half apart


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's growth of attention for a `factor` times longer context.

    It is 0.1 weight ln(factor) + 1.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_rope(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    can_stretch: bool = False,
    usual_factor: float | None = None,
    usual_theta: float | None = None,
) -> Rope:
    """Read the rotary embedding of a family that rotates heads of `head_dim`.

    With `can_stretch` it may be made for longer contexts than it was trained on, in one of the ways
    of `_STRETCHES`. usual_factor: the share of dimensions that rotate where the config names none;
    without it all have to. usual_theta: the one of files that name none; without it they have to.
    """
    given = [
        _RotaryFields(
            fields.optional_number("rope_theta", low=1.0, high=1e15),
            fields.optional_number("partial_rotary_factor", low=0.0, high=1.0),
        )
    ]
    name = "original_max_position_embeddings"
    original = fields.optional_integer(name, low=1, high=MAX_POSITIONS)
    positions = _Positions(max_positions, original)
    for name in ("rope_parameters", "rope_scaling"):
        if fields.raw(name) not in (None, {}):
            given.append(_nested(fields, name, positions, can_stretch))
    theta = _agreed("rope_theta", [each.theta for each in given]) or usual_theta
    if theta is None:
        raise ConfigError("config.json has no rope_theta, neither flat nor in rope_parameters.")
    outside, *nested = given
    # With both transformers takes nothing from rope_parameters, no rope_theta either.
    alike = {
        each._replace(theta=each.theta or outside.theta, factor=each.factor or outside.factor)
        for each in nested
    }
    if len(alike) > 1:
        raise ConfigError(
            "config.json: rope_parameters and rope_scaling disagree; only one of them may be given."
        )
    stretch = nested[0].stretch if nested else _Stretch()
    if stretch.yarn is not None and theta == 1:
        raise ConfigError("config.json: a rope_theta of 1 has no frequencies for YaRN to stretch.")
    factor = _agreed("partial_rotary_factor", [each.factor for each in given])
    rotary_dim = _rotary_dim(fields, head_dim, factor, usual_factor or 1.0)
    if rotary_dim != head_dim and usual_factor is None:
        raise UnsupportedError(
            f"config.json: {rotary_dim} of {head_dim} dimensions rotate (partial_rotary_factor, "
            f"rotary_dim); in this family all do: {OTHER_MODEL}."
        )
    divisors = _divisors(stretch, theta, rotary_dim)
    return Rope(theta, rotary_dim, stretch.yarn, stretch.mscale_all_dim, divisors)


class PairDivisors(NamedTuple):
    """Divisors of the frequency of each pair of dimensions, from a GGUF file.

    Stands for `rope_scaling`; a `config.json` cannot express it.
    """

    numbers: tuple[float, ...]


class _Bands(NamedTuple):
    """Llama 3.1's scaling: fast frequencies stay, slow ones are divided.

    Speed is measured in turns within `original_positions`.
    """

    factor: float
    low: float  # frequencies of fewer turns are divided by the factor
    high: float  # frequencies of more turns stay
    original_positions: int


class _Stretch(NamedTuple):
    """Change of frequencies for longer contexts."""

    yarn: Yarn | None = None
    mscale_all_dim: float = 0.0
    divisors: tuple[float, ...] = ()
    bands: _Bands | None = None


class _RotaryFields(NamedTuple):
    """Rotary parameters from one place of the file; None if not given."""

    theta: float | None
    factor: float | None  # of a head's dimensions, those that rotate
    stretch: _Stretch = _Stretch()


class _Positions(NamedTuple):
    """Contexts that stand outside of a rotary embedding's parameters."""

    longest: int
    original: int | None  # before stretching


def _nested(fields: Fields, name: str, positions: _Positions, can_stretch: bool) -> _RotaryFields:
    given = fields.raw(name)
    if isinstance(given, PairDivisors):
        return _RotaryFields(None, None, _by_pair(given, can_stretch))
    if not isinstance(given, dict):
        raise fields.error(name, "must be an object")
    inner = Fields(given, f"{name}.")
    kind = inner.text("rope_type", "type", default="default")
    known = ["default", *(_STRETCHES if can_stretch else ())]
    if kind not in known:
        raise UnsupportedError(
            f"config.json: {inner.prefix[:-1]}: the rotary embedding {shown(kind)} is not "
            f"supported, only {', '.join(map(shown, known))}; {OTHER_MODEL}."
        )
    stretch = _Stretch() if kind == "default" else _STRETCHES[kind](inner, positions)
    rotary = _RotaryFields(
        inner.optional_number("rope_theta", low=1.0, high=1e15),
        inner.optional_number("partial_rotary_factor", low=0.0, high=1.0),
        stretch,
    )
    inner.asked.update(_OF_IMAGES)
    _refuse_unknown(inner, kind)
    return rotary


def _rotary_dim(fields: Fields, head_dim: int, factor: float | None, usual: float) -> int:
    rotary_dim = fields.optional_integer("rotary_dim", low=2, high=MAX_HEADS)
    from_factor = None if factor is None else float(int(head_dim * factor))
    rotating = _agreed("rotary_dim (partial_rotary_factor * head_dim)", [rotary_dim, from_factor])
    return int(head_dim * usual) if rotating is None else int(rotating)


def _linear(inner: Fields, positions: _Positions) -> _Stretch:
    """Read linear scaling: dividing positions by a factor equals dividing all frequencies."""
    return _Stretch(divisors=(inner.number("factor", low=1.0, high=1e6),))


def _dynamic(inner: Fields, positions: _Positions) -> _Stretch:
    """Read NTK scaling beyond the model's positions, where no text of these families gets."""
    inner.number("factor", low=1.0, high=1e6)
    return _Stretch()


def _llama3(inner: Fields, positions: _Positions) -> _Stretch:
    bands = _Bands(
        factor=inner.number("factor", low=1.0, high=1e6),
        low=inner.number("low_freq_factor", low=1e-3, high=1e6),
        high=inner.number("high_freq_factor", low=1e-3, high=1e6),
        original_positions=_original_positions(inner, positions),
    )
    if bands.low >= bands.high:
        raise inner.error("low_freq_factor", f"must be below high_freq_factor {bands.high:g}")
    return _Stretch(bands=bands)


def _original_positions(inner: Fields, positions: _Positions) -> int:
    """Read the context before stretching, which may stand inside or outside."""
    name = "original_max_position_embeddings"
    own = inner.optional_integer(name, low=1, high=MAX_POSITIONS)
    agreed = _agreed(name, [own, positions.original])
    return positions.longest if agreed is None else int(agreed)


def _by_pair(given: PairDivisors, can_stretch: bool) -> _Stretch:
    if not can_stretch:
        raise UnsupportedError(
            f"Divisors of rotary frequencies are not supported in this family; {OTHER_MODEL}."
        )
    if len(given.numbers) < 2:  # one would be taken for that of all pairs
        raise ConfigError(f"{len(given.numbers)} rotary frequencies have divisors; more rotate.")
    for number in given.numbers:
        if not _LEAST_DIVISOR <= number <= _MOST_DIVISOR:
            raise ConfigError(
                f"The divisors of rotary frequencies must be numbers from {_LEAST_DIVISOR:g} to "
                f"{_MOST_DIVISOR:g}, not {number:g}."
            )
    return _Stretch(divisors=given.numbers)


def _divisors(stretch: _Stretch, theta: float, rotary_dim: int) -> tuple[float, ...]:
    """Return the divisors of the frequencies, as in `Rope`."""
    if stretch.bands is not None:
        pairs = range(0, rotary_dim, 2)
        return tuple(_of_band(theta ** (-pair / rotary_dim), stretch.bands) for pair in pairs)
    if len(stretch.divisors) not in (0, 1, rotary_dim // 2):
        raise ConfigError(
            f"{len(stretch.divisors)} rotary frequencies have divisors; {rotary_dim // 2} rotate."
        )
    return stretch.divisors


def _of_band(frequency: float, bands: _Bands) -> float:
    """Return a frequency's divisor; between the bands it mixes both ends."""
    num_turns = bands.original_positions * frequency / (2 * math.pi)
    share = min(max((num_turns - bands.low) / (bands.high - bands.low), 0.0), 1.0)
    return 1.0 / ((1.0 - share) / bands.factor + share)


def _yarn(inner: Fields, positions: _Positions) -> _Stretch:
    factor = inner.number("factor", low=1.0, high=1e6)
    own, everywhere = (
        inner.optional_number(name, low=0.0, high=100.0) for name in ("mscale", "mscale_all_dim")
    )
    amplitude = inner.optional_number("attention_factor", low=1e-3, high=1e3)
    if amplitude is None and own and everywhere:
        amplitude = mscale(factor, own) / mscale(factor, everywhere)
    yarn = Yarn(
        factor=factor,
        original_positions=_original_positions(inner, positions),
        beta_fast=_turns(inner, "beta_fast") or 32.0,
        beta_slow=_turns(inner, "beta_slow") or 1.0,
        amplitude=mscale(factor, 1.0) if amplitude is None else amplitude,
        is_rounded=inner.boolean("truncate", default=True),
    )
    inner.asked.add("finetuned")  # of YaRN's own models; says how they were made
    return _Stretch(yarn, everywhere or 0.0)


def _turns(inner: Fields, name: str) -> float | None:
    """Read the turns of a frequency within the original context; 0 means the default."""
    turns = inner.optional_number(name, low=0.0, high=1e6)
    if turns and turns < _LEAST_TURNS:
        raise inner.error(name, f"must be 0 or at least {_LEAST_TURNS:g}")
    return turns


_STRETCHES = {"yarn": _yarn, "linear": _linear, "llama3": _llama3, "dynamic": _dynamic}


def _refuse_unknown(inner: Fields, kind: str) -> None:
    for name, value in inner.values.items():
        if name not in inner.asked and value is not None:
            raise UnsupportedError(
                f"config.json: {inner.prefix}{shown(name)} {shown(value)} is not supported in the "
                f"rotary embedding {shown(kind)}; {OTHER_MODEL}."
            )


def _agreed(name: str, values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(set(known)) > 1:
        raise ConfigError(f"config.json gives {name} twice: {known[0]:g} and {known[-1]:g}.")
    return known[0] if known else None
