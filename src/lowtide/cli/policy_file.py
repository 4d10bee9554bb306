"""`--policy-file mine.py`: a user's own code, which registers policies before the verb runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from lowtide.errors import LowtideError, StorageError, UsageError
from lowtide.policies.catalogue import CATALOGUE


def load_policy_file(path: Path) -> None:
    """Run a file that calls `lowtide.extend.register_policy`.

    Raises StorageError for a file that cannot be read, UsageError for one that fails or registers
    no policy.
    """
    if not path.is_file():
        raise StorageError(
            f"--policy-file {path}: there is no such file; give the path of a Python file that "
            "registers a policy."
        )
    name = f"lowtide_policy_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--policy-file {path}: give a Python file, whose name ends with .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where data classes look for their module
    before = set(CATALOGUE)
    try:
        spec.loader.exec_module(module)
    except LowtideError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise UsageError(
            f"--policy-file {path} ends with {type(error).__name__}: {error}; -v shows where."
        ) from error
    if not CATALOGUE.keys() - before:
        raise UsageError(
            f"--policy-file {path} registers no new policy: call lowtide.extend.register_policy in "
            "it, under a name of your own."
        )
