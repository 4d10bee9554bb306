"""Programs in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def python(
    *arguments: str, timeout: float | None = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Python to its end and return the process, with its output as text.

    Its standard input is empty unless `options` give it `input`.
    """
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
