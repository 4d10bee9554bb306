"""Picture of passes' memory at its peak: a stacked bar for each share of masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.cli.plotting import check_plot, save_figure
from lowtide.config import format_size

if TYPE_CHECKING:
    from lowtide.engine.planning.passes import PlannedPass, PlannedPasses

NUM_NAMED = 7
"""Number of buffers, the largest, with a colour of their own; all others are one part."""

OTHERS = "all other buffers"


def draw(passes: PlannedPasses, model: str, path: Path) -> None:
    """Draw the largest buffers by name and the others as one. Raises as `check_plot` does."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    labels = [f"{step.num_masked} masked" for step in passes.steps]
    bottom = [0.0] * len(labels)
    for name, sizes in parts(passes.steps).items():
        heights = [size / 2**20 for size in sizes]
        axes.bar(labels, heights, bottom=bottom, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    limit = passes.workspace_bytes / 2**20
    axes.axhline(limit, color="black", linestyle="--", linewidth=1, label="the plan's workspace")
    axes.set_ylabel("MiB")
    axes.set_title(f"{model}: peak of a pass over {passes.steps[0].num_tokens} tokens")
    beside = ", ".join(f"{name} {format_size(size)}" for name, size in passes.fixed if size)
    axes.set_xlabel(f"beside it: {beside}", fontsize=8)
    axes.legend(fontsize=8, reverse=True, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)


def parts(steps: Sequence[PlannedPass]) -> dict[str, list[int]]:
    """Return the bytes of each part of each step's bar, from below; same names are one part."""
    held_of = [_by_name(step.held) for step in steps]
    most: Counter[str] = Counter()
    for held in held_of:
        most |= held
    named = [name for name, _ in most.most_common(NUM_NAMED)]
    found = {name: [held[name] for held in held_of] for name in named}
    return found | {OTHERS: [h.total() - sum(h[name] for name in named) for h in held_of]}


def _by_name(held: Sequence[tuple[str, int]]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for name, num_bytes in held:
        sizes[name] += num_bytes
    return sizes
