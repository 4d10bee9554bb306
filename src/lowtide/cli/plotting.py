"""Import of matplotlib, which lowtide alone does not install."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

from lowtide.errors import UnsupportedError
from lowtide.files.whole_file import check_writable, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")

_DRAWN_BY = "drawn by lowtide"  # in a plot's own metadata


def check_plot(path: Path) -> None:
    """Make the folder; raise UnsupportedError or StorageError if no plot can be drawn."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "--plot draws with matplotlib, which is not installed: pip install 'lowtide[plot]'."
        )
    if path.suffix not in SUFFIXES:
        raise UnsupportedError(
            f"--plot {path}: a plot's name ends with {', '.join(SUFFIXES)}; choose one."
        )
    check_writable(path, "plot", _is_drawn_here)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a plot completely or not at all. Raise StorageError."""
    form = path.suffix.removeprefix(".")
    metadata = {"Software" if form == "png" else "Creator": _DRAWN_BY}
    with whole_file(path, "plot", _is_drawn_here) as file:
        figure.savefig(file, format=form, dpi=120, metadata=metadata)


def _is_drawn_here(file: IO[bytes]) -> bool:
    return _DRAWN_BY.encode() in file.read()
