"""Lines that `make bench`, `make bench-large` or `make gpu` would measure again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import bench
from common.masked_shapes import MODELS

_OPTION_OF = {
    "num_prompt": "prompt",
    "num_new": "new",
    "new_tokens": "new",
    "num_requests": "requests",
    "our_lengths": "lengths",
    "traced_lengths": "traced",
    "timed_lengths": "timed",
    "prompt_share": "share",
    "prompt_shares": "shares",
    "chunked_length": "chunked",
}
"""The option that a setting of a line was, where its name is another one."""
_LENGTH_OF = {
    "step time": "lengths",
    "planned": "lengths",
    "evenness": "traced",
    "reserved": "traced",
    "head alone": "timed",
    "lazy over static": "timed",
    "chunked": "chunked",
    "planning": "planned",
}
"""The option that named the one length of such a line; other lengths of its run do not matter."""
_OF_NO_LENGTH = ("planned parts",)  # of a script that has lengths for its other lines
_NOT_COMPARED = ("repeats", "limit")  # tables look at turns themselves; a limit is the machine's


def is_repeatable(row: Mapping[str, Any]) -> bool:
    """Return True if a call in `bench.py` has a line's settings, or `make gpu` measured it.

    An option that a call leaves to its script is no difference. A call measures what lines of fewer
    shares have, too, and a line of one length is that of any call with this length.
    """
    if row["benchmark"] == "gpu":  # its settings are the stage, and what GPU there is
        return bool(row["settings"]["stage"] == "short")
    settings = {
        _OPTION_OF.get(name, name): value
        for name, value in row["settings"].items()
        if name not in _NOT_COMPARED
    }
    own = _LENGTH_OF.get(row["what"])
    if own is not None or row["what"] in _OF_NO_LENGTH:
        others = set(_LENGTH_OF.values())
        settings = {name: value for name, value in settings.items() if name not in others}
    if own is not None:
        settings[own] = row["num_tokens"]
    if (model := row.get("model")) in MODELS:  # published shapes, which calls name
        settings["models"] = model
    return any(
        all(_fits(value, options.get(name)) for name, value in settings.items())
        for options in _calls(row["benchmark"].replace(" ", "_"))
    )


def _fits(value: object, option: object) -> bool:
    if value is None or option is None:
        return True
    values, options = (each if isinstance(each, list) else [each] for each in (value, option))
    return all(each in options for each in values)


@cache
def _calls(script: str) -> tuple[Mapping[str, Any], ...]:
    """The options of a script in each of its calls."""
    calls = [call for call in (*bench.SMALL, *bench.LARGE) if call.name == script]
    found = []
    for call in calls:
        with patch.object(sys, "argv", [script, *call.arguments]):
            found.append(vars(import_module(script)._options()))
    return tuple(found)
