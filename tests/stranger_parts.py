"""The stranger's policy and device, without its distribution: its entry points stay unknown."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent / "stranger" / "site" / "stranger"


def _part(name: str) -> ModuleType:
    spec = spec_from_file_location(f"stranger_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


policies = _part("policies")
devices = _part("devices")
