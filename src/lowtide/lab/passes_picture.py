"""A picture of what passes hold at their peak: a stacked bar for each share of masks.

`.png` and `.pdf` are drawn by matplotlib; `.svg`, and `.html` around one, are written here and need
nothing.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lowtide.config import format_size
from lowtide.engine.passes import PlannedPasses
from lowtide.errors import StorageError, UnsupportedError
from lowtide.files.whole_file import check_writable, whole_file

DRAWN_HERE = (".svg", ".html")
DRAWN_BY_MATPLOTLIB = (".png", ".pdf")
NUM_NAMED = 7
"""Buffers with a colour of their own, the largest; all others are one part."""

OTHERS = "all other buffers"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#bbbbbb")

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 860, 460, 90, 50, 60
_LEGEND = 250


class Bar(NamedTuple):
    """One step kind: its parts from below, with their bytes."""

    label: str
    parts: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)


class Picture(NamedTuple):
    """What is drawn, however."""

    title: str
    caption: str
    limit_bytes: int  # of the workspace
    bars: tuple[Bar, ...]

    @property
    def names(self) -> list[str]:
        """The names of all parts, in the order in which they are stacked."""
        return list(dict.fromkeys(name for bar in self.bars for name, _ in bar.parts))


def check_picture(path: Path) -> None:
    """Makes the folder; raises UnsupportedError or StorageError where nothing can be drawn."""
    known = (*DRAWN_HERE, *DRAWN_BY_MATPLOTLIB)
    if path.suffix not in known:
        raise UnsupportedError(
            f"--plot {path}: a picture's name ends with {', '.join(known)}; choose one."
        )
    if path.suffix in DRAWN_BY_MATPLOTLIB and find_spec("matplotlib") is None:
        raise UnsupportedError(
            f"--plot {path}: {path.suffix} is drawn by matplotlib, which is not installed: pip "
            f"install 'lowtide[plot]', or choose a name that ends with {' or '.join(DRAWN_HERE)}."
        )
    check_writable(path, "picture")


def draw(passes: PlannedPasses, model: str, path: Path) -> None:
    """Writes the file. Raises as `check_picture` does."""
    check_picture(path)
    picture = picture_of(passes, model)
    if path.suffix in DRAWN_BY_MATPLOTLIB:
        _plot(picture, path)
        return
    text = svg(picture)
    if path.suffix == ".html":
        title = html.escape(picture.title)
        text = f"<!doctype html><meta charset='utf-8'><title>{title}</title>\n{text}"
    with whole_file(path, "picture") as file:
        file.write(text.encode())


def picture_of(passes: PlannedPasses, model: str) -> Picture:
    """The largest buffers by name, the others as one."""
    most: Counter[str] = Counter()
    for step in passes.steps:
        for name, num_bytes in _by_name(step.held).items():
            most[name] = max(most[name], num_bytes)
    named = [name for name, _ in most.most_common(NUM_NAMED)]
    bars = []
    for step in passes.steps:
        held = _by_name(step.held)
        parts = [(name, held.pop(name, 0)) for name in named] + [(OTHERS, sum(held.values()))]
        bars.append(Bar(f"{step.num_masked} masked", tuple(parts)))
    beside = ", ".join(f"{name} {format_size(size)}" for name, size in passes.fixed if size)
    title = f"{model}: peak of a pass over {passes.steps[0].num_tokens} tokens"
    return Picture(title, f"beside it: {beside}", passes.workspace_bytes, tuple(bars))


def svg(picture: Picture) -> str:
    """The picture as one SVG element."""
    most = max(picture.limit_bytes, *(bar.num_bytes for bar in picture.bars), 1)
    floor = _HEIGHT - _BOTTOM
    per_byte = (floor - _TOP) / most
    step = (_WIDTH - _LEFT - _LEGEND) / len(picture.bars)
    drawn = [_text(_LEFT, 24, picture.title, "font-weight='bold'")]
    drawn.append(_text(_LEFT, _HEIGHT - 10, picture.caption, "fill='#555'"))
    for number, bar in enumerate(picture.bars):
        left, below = _LEFT + number * step + step * 0.15, float(floor)
        for (name, num_bytes), colour in zip(bar.parts, COLOURS, strict=False):
            height = num_bytes * per_byte
            below -= height
            said = html.escape(f"{name}: {format_size(num_bytes)}")
            drawn.append(
                f"<rect x='{left:.1f}' y='{below:.1f}' width='{step * 0.7:.1f}' "
                f"height='{height:.1f}' fill='{colour}'><title>{said}</title></rect>"
            )
        drawn.append(_text(left, below - 5, format_size(bar.num_bytes)))
        drawn.append(_text(left, floor + 18, bar.label))
    limit = floor - picture.limit_bytes * per_byte
    drawn.append(
        f"<line x1='{_LEFT}' x2='{_WIDTH - _LEGEND}' y1='{limit:.1f}' y2='{limit:.1f}' "
        "stroke='#000' stroke-dasharray='5 4'/>"
    )
    drawn.append(_text(4, limit + 4, format_size(picture.limit_bytes)))
    drawn += _legend(picture.names)
    inside = "\n".join(drawn)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' "
        f"width='{_WIDTH}' height='{_HEIGHT}' font-family='sans-serif' font-size='12'>\n"
        f"<rect width='100%' height='100%' fill='#fff'/>\n{inside}\n</svg>\n"
    )


def _legend(names: Sequence[str]) -> list[str]:
    """From the top as the bars are stacked, then what the dashes are."""
    left, drawn = _WIDTH - _LEGEND + 20, []
    for number, (name, colour) in enumerate(reversed(list(zip(names, COLOURS, strict=False)))):
        top = _TOP + 20 * number
        drawn.append(f"<rect x='{left}' y='{top}' width='12' height='12' fill='{colour}'/>")
        drawn.append(_text(left + 18, top + 10, name))
    below = _TOP + 20 * len(names) + 10
    return [*drawn, _text(left, below, "- - -  the plan's workspace")]


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{html.escape(text)}</text>"


def _by_name(held: Sequence[tuple[str, int]]) -> Counter[str]:
    """Buffers that bear the same name together."""
    sizes: Counter[str] = Counter()
    for name, num_bytes in held:
        sizes[name] += num_bytes
    return sizes


def _plot(picture: Picture, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    labels = [bar.label for bar in picture.bars]
    bottom = [0.0] * len(labels)
    for part, (name, colour) in enumerate(zip(picture.names, COLOURS, strict=False)):
        heights = [bar.parts[part][1] / 2**20 for bar in picture.bars]
        axes.bar(labels, heights, bottom=bottom, label=name, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    limit = picture.limit_bytes / 2**20
    axes.axhline(limit, color="black", linestyle="--", linewidth=1, label="the plan's workspace")
    axes.set_ylabel("MiB")
    axes.set_title(picture.title)
    axes.set_xlabel(picture.caption, fontsize=8)
    axes.legend(fontsize=8, reverse=True, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        figure.savefig(path, dpi=120)
    except OSError as reason:
        raise StorageError(f"Picture {path} cannot be written: {reason.strerror}.") from reason
