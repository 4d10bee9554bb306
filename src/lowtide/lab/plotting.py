"""What all plots need: matplotlib, which is not installed with lowtide alone."""

from __future__ import annotations

from importlib.util import find_spec

from lowtide.errors import UnsupportedError


def check_matplotlib() -> None:
    """Raises UnsupportedError where there is none."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "--plot draws with matplotlib, which is not installed: pip install 'lowtide[plot]'."
        )
