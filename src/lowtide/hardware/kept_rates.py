"""Keeps the rates of this machine's parts from one run to the next.

One JSON file per machine; what a model's experts cost is kept elsewhere (`store.py`).
`lowtide doctor` measures them, predictions read them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowtide.errors import CheckpointError, StorageError
from lowtide.files.folders import cache_folder
from lowtide.files.json_file import read_object
from lowtide.files.whole_file import whole_file
from lowtide.hardware.machine import RATES_METHOD, Machine, Rate
from lowtide.version import __version__

MAX_FILE_BYTES = 1 << 16

_log = logging.getLogger(__name__)


def rates_path(machine: Machine) -> Path:
    """Where a machine's file is, or would be. Raises StorageError where there is no such folder."""
    text = json.dumps(_identity(machine), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return cache_folder() / "rates" / f"{digest}.json"


def keep_rates(machine: Machine, rates: Sequence[Rate]) -> None:
    """Writes the file, whole or not at all; where that cannot be, a notice in the log."""
    content = {"of": _identity(machine), "rates": [rate._asdict() for rate in rates]}
    try:
        path = rates_path(machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, "rates") as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())
    except (OSError, StorageError) as error:
        _log.warning("%s The measured rates are not kept.", error)


def kept_rates(machine: Machine) -> tuple[Rate, ...]:
    """What is kept of a machine; nothing where it was never measured. A file that is damaged is a
    notice in the log."""
    try:
        path = rates_path(machine)
    except StorageError:  # no home, so nothing was kept
        return ()
    if not os.path.lexists(path):
        return ()
    try:
        content = read_object(path, MAX_FILE_BYTES)
        if content.get("of") != json.loads(json.dumps(_identity(machine))):
            raise ValueError("it is of another machine or version")
        return tuple(_rate(value) for value in content["rates"])
    except CheckpointError as error:  # which names the file
        _log.warning("%s It was to hold this machine's rates; lowtide doctor measures them.", error)
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("%s does not hold a machine's rates: %s.", path, error)
    return ()


def _identity(machine: Machine) -> dict[str, Any]:
    return {"version": __version__, "method": RATES_METHOD, **asdict(machine)}


def _rate(value: Any) -> Rate:
    """Raises ValueError or TypeError for anything else."""
    rate = Rate(**value)
    numbers = (rate.per_s, rate.spread, rate.ceiling)
    if not all(type(number) in (int, float) and 0 <= number < math.inf for number in numbers):
        raise ValueError(f"{value!r} is not a rate")
    if not rate.per_s or type(rate.name) is not str or type(rate.unit) is not str:
        raise ValueError(f"{value!r} is not a rate")
    return rate
