"""Layers that weights have beyond those of their model: said, since a model may be shortened for a
trial, and with a `config.json` of another model answers make no sense.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

_log = logging.getLogger(__name__)

_OF_PREDICTION = "eh_proj"
"""In the name of a tensor of each layer for the prediction of further tokens, which families have
behind their last one and lowtide does not compute."""

_MAX_DIGITS = 6


def warn_of_further_layers(names: Iterable[str], layers: str, num_layers: int) -> None:
    """A warning, once, where tensors are of layers from `num_layers` on, other than for prediction.

    layers: what precedes a layer's number in a name, such as `model.layers.`.
    """
    found: dict[int, bool] = {}  # whether it is one for prediction
    for name in names:
        if name.startswith(layers):
            number = name[len(layers) :].partition(".")[0]
            if number.isdecimal() and len(number) <= _MAX_DIGITS and int(number) >= num_layers:
                found[int(number)] = found.get(int(number), False) or _OF_PREDICTION in name
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
