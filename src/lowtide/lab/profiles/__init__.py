"""Hardware profiles: machines turned into the costs of one expert.

There are two kinds, never mixed: a data sheet with the share of it that kernels reach
(`DataSheet`), and a paper's machine as its figures show it (`PaperMachine`). They are for replaying
traces on machines that are not here; a machine that is here is measured instead.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from lowtide.core import Costs, Curve, MoEShape
from lowtide.errors import UsageError
from lowtide.files.json_file import meant
from lowtide.files.regular_file import read_from
from lowtide.lab.profiles.paper_machine import (
    EXPERTS,
    MOST,
    PaperMachine,
    checked_number,
    checked_table,
    parse_paper_machine,
)

_MAX_PROFILE_BYTES = 1 << 16
_OTHER_PROFILE = "lowtide bench MODEL --profile FILE writes one"
_LEAST = 1e-6  # of any value: times stay finite
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "device": ("memory_GB", "bandwidth_GBps", "compute_TFLOPs"),
    "link": ("bandwidth_GBps", "latency_us"),
    "host": ("memory_GB", "bandwidth_GBps", "compute_TFLOPs"),
    "sync": ("latency_us",),
    "efficiency": ("device", "link", "host"),
}


@dataclass(frozen=True, slots=True)
class Processor:
    """Something that computes: as fast as its memory or its arithmetic allows (roofline)."""

    memory_bytes: float
    bytes_per_s: float
    operations_per_s: float

    def curve(self, weight_bytes: float, operations_per_token: float) -> Curve:
        """Seconds to run weights of `weight_bytes`, by tokens: reading, then arithmetic."""
        read_s = weight_bytes / self.bytes_per_s
        token_s = operations_per_token / self.operations_per_s
        knee = max(1, math.ceil(read_s / token_s))
        return Curve([(knee, max(read_s, knee * token_s)), (2 * knee, 2 * knee * token_s)])


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Machine described by its data sheet; rates are reduced to the share that is reached."""

    name: str
    device: Processor
    host: Processor
    link_bytes_per_s: float
    link_latency_s: float
    sync_s: float

    @property
    def device_memory_bytes(self) -> float:
        return self.device.memory_bytes

    @property
    def host_memory_bytes(self) -> float:
        return self.host.memory_bytes

    def costs(self, shape: MoEShape, weight_bytes: float = 2.0) -> Costs:
        """Return the costs of a model's experts on this machine.

        The rest of a layer counts as four square projections and one shared expert.
        """
        num_weights = 3 * shape.hidden_size * shape.expert_size
        expert_bytes = round(weight_bytes * num_weights)
        dense_bytes = weight_bytes * (4 * shape.hidden_size**2 + num_weights)
        operations = 2 * num_weights  # one multiplication and one addition per weight and token
        return Costs(
            expert_bytes=expert_bytes,
            link_s=self.link_latency_s + expert_bytes / self.link_bytes_per_s,
            host_s=self.host.curve(expert_bytes, operations),
            device_s=self.device.curve(expert_bytes, operations),
            dense_s=self.device.curve(dense_bytes, 2 * dense_bytes / weight_bytes),
            sync_s=self.sync_s,
        )


Profile = DataSheet | PaperMachine


def profile_names() -> list[str]:
    """The profiles that come with lowtide."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or one from a TOML file. Raises UsageError."""
    if name in profile_names():
        file: Traversable = resources.files(__name__).joinpath(f"{name}.toml")
    elif name.endswith(".toml"):
        file = Path(name)
    else:
        raise UsageError(
            f"Hardware profile {name!r} is not known; choose {', '.join(profile_names())} "
            f"or give a .toml file.{meant(name, profile_names())}"
        )
    try:
        with file.open("rb") as opened:
            data = read_from(opened, _MAX_PROFILE_BYTES + 1, f"Profile {name}", UsageError)
    except OSError as reason:
        told = f"Profile {name} cannot be read: {reason.strerror}"
        raise UsageError(f"{told}; {_OTHER_PROFILE}.") from reason
    if len(data) > _MAX_PROFILE_BYTES:
        told = f"Profile {name} has more than {_MAX_PROFILE_BYTES} bytes"
        raise UsageError(f"{told}; {_OTHER_PROFILE}.")
    try:
        return parse_profile(data.decode(), name)
    except UnicodeDecodeError:
        told = f"Profile {name} is not text in UTF-8"
        raise UsageError(f"{told}; {_OTHER_PROFILE}.") from None


def parse_profile(text: str, source: str) -> Profile:
    """A profile from TOML text; `source` names it in the UsageError raised when it is not one."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as reason:
        told = f"Profile {source} is not valid TOML: {reason}"
        raise UsageError(f"{told}; {_OTHER_PROFILE}.") from None
    if EXPERTS in table:
        return parse_paper_machine(table, source)
    name = table.pop("name", None)
    if not isinstance(name, str) or set(table) != set(_SECTIONS):
        raise UsageError(
            f"Profile {source} needs a name and the sections {', '.join(_SECTIONS)}, or the curves "
            "of a paper's machine (expert, layer)."
        )
    value = {section: _numbers(table[section], section, source) for section in _SECTIONS}
    share = value["efficiency"]
    return DataSheet(
        name=name,
        device=_processor(value["device"], share["device"]),
        host=_processor(value["host"], share["host"]),
        link_bytes_per_s=1e9 * value["link"]["bandwidth_GBps"] * share["link"],
        link_latency_s=1e-6 * value["link"]["latency_us"],
        sync_s=1e-6 * value["sync"]["latency_us"],
    )


def _processor(value: Mapping[str, float], share: float) -> Processor:
    return Processor(
        memory_bytes=1e9 * value["memory_GB"],
        bytes_per_s=1e9 * value["bandwidth_GBps"] * share,
        operations_per_s=1e12 * value["compute_TFLOPs"] * share,
    )


def _numbers(section: Any, name: str, source: str) -> dict[str, float]:
    most = 1.0 if name == "efficiency" else MOST
    return {
        key: checked_number(value, f"{name}.{key}", source, _LEAST, most)
        for key, value in checked_table(section, _SECTIONS[name], name, source).items()
    }
