"""Warn of layers in the weights beyond those of the configuration.

A model may be shortened for a trial; otherwise the `config.json` belongs to another model, and
answers make no sense.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

_log = logging.getLogger(__name__)

_PREDICTION_MARK = "eh_proj"
"""Marks a layer that predicts further tokens, which lowtide does not compute.

Families have such layers after their last one.
"""

_MAX_DIGITS = 6


def warn_of_extra_layers(names: Iterable[str], layers: str, num_layers: int) -> None:
    """Warn once of tensors in layers from `num_layers` on, except prediction layers.

    layers: prefix of a layer's number in names, such as `model.layers.`.
    """
    found: dict[int, bool] = {}  # True for a prediction layer
    for name in names:
        if name.startswith(layers):
            number = name[len(layers) :].partition(".")[0]
            if number.isdecimal() and len(number) <= _MAX_DIGITS and int(number) >= num_layers:
                found[int(number)] = found.get(int(number), False) or _PREDICTION_MARK in name
    left_out = tuple(sorted(number for number, predicts in found.items() if not predicts))
    if left_out:
        _warn(left_out[0], left_out[-1], num_layers)


@cache  # once, however often the model is opened
def _warn(first: int, last: int, num_layers: int) -> None:
    layers = f"layer {first}" if first == last else f"layers {first} to {last}"
    _log.warning(
        "The weights also have %s, and the configuration %d layers (from 0): what is more is left "
        "out. Unless the model is to be shortened the configuration is of another one.",
        layers,
        num_layers,
    )
