"""The process that renders chat templates (`template_worker.py`), one per program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.child_process import ChildError, ChildProcess
from lowtide.errors import UsageError
from lowtide.files.json_file import printable


class TemplateProcess(ChildProcess):
    """Child process whose errors are explained to users."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("template_worker.py"))

    def ask(self, request: Mapping[str, object], wall_s: float, lane: int = 0) -> dict[str, Any]:
        """Ask as `ChildProcess`. Raises UsageError."""
        try:
            return super().ask(request, wall_s, lane)
        except ChildError as error:
            raise UsageError(_reason(error)) from None


def _reason(error: ChildError) -> str:
    if error.late_s is not None:
        return (
            f"The model's chat template did not finish within {error.late_s:g} s; give a plain "
            "text prompt instead."
        )
    if error.signal:
        return (
            f"The model's chat template was stopped (signal {error.signal}): it used more "
            "processor time or memory than a template may."
        )
    return f"The model's chat template could not be rendered: {printable(error.said)}"


TEMPLATES = TemplateProcess()
"""The only instance; a template renders whole conversations, a few per second."""
