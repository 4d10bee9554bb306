"""Summary of a calibration: drift, the best refresh interval, and the similarity of steps.

Everything is computed from the calibration's trace, times with a machine's costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lowtide.cli.plotting import check_plot, save_figure
from lowtide.core import Costs, FloatArray, IntArray
from lowtide.lab.calibrate import top_share
from lowtide.lab.simulation.simulator import fastest_tau
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.tau import TAUS, drift, miss_shares, paper_tau
from lowtide.replay.calibration import GATES, TOP_SIZES, Calibration
from lowtide.replay.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESIDENT_SHARES = (0.25, 0.5, 0.75)
INTERVALS = (1, 2, 5)
"""Distances, in steps, at which steps are compared."""

STEP_SIMILARITY, DISTINCT_EXPERTS = "step-similarity.png", "distinct-experts.png"


class Budget(NamedTuple):
    """TIDE's interval at a number of residents per layer."""

    num_residents: int
    drift: float  # TIDE's d
    misses: list[float]  # TIDE's f(tau) for tau from 1
    paper_tau: int
    auto_tau: int  # of least simulated time


def weigh_budgets(calibration: Calibration, costs: Costs) -> list[Budget]:
    """Return drift and intervals with each of `RESIDENT_SHARES` of the experts, at least one."""
    num_experts = calibration.shape.num_experts
    hits = calibration.trace.hits()
    return [
        _budget(calibration.trace, hits, max(1, round(share * num_experts)), costs)
        for share in RESIDENT_SHARES
    ]


def step_similarity(blocks: Sequence[IntArray], interval: int = 1) -> FloatArray:
    """Return the cosine of a step's hits with those `interval` steps before (TIDE's Fig. 2b).

    By step, as a mean over layers and sufficiently long blocks; `blocks` as from `Trace.blocks`.
    [most steps - interval]
    """
    return _by_step([_cosines(block[interval:], block[:-interval]) for block in blocks])


def distinct_experts(blocks: Sequence[IntArray]) -> FloatArray:
    """Return a layer's activated experts, by step (TIDE's Fig. 2a); means as above."""
    return _by_step([(block > 0).sum(2).mean(1) for block in blocks])


def previous_step(trace: Trace) -> FloatArray:
    """Measure how well a step predicts the next one's experts in the same layer.

    For each n of `TOP_SIZES`: of the n experts with most tokens in a step, the share that is among
    the n of the next (`top_share`), averaged over all steps with a predecessor. Nothing is learned,
    so the calibration's own text may be used. 0 if no step follows another. [layers, 4]
    """
    pairs = [pair for block in trace.blocks() for pair in pairwise(block)]
    shares = np.zeros((trace.shape.num_layers, len(TOP_SIZES)))
    for last, now in pairs:
        for layer, size in np.ndindex(shares.shape):
            shares[layer, size] += top_share(last[layer], now[layer], TOP_SIZES[size]) / len(pairs)
    return shares


def as_object(calibration: Calibration, budgets: Sequence[Budget]) -> dict[str, object]:
    """Return everything for `--json`."""
    trace, blocks, inputs = calibration.trace, calibration.trace.blocks(), calibration.inputs
    of_inputs = {}
    if inputs is not None:
        told = {"num_pairs": inputs.num_pairs, "num_unseen": inputs.num_unseen}
        of_inputs = {"inputs": told}
    return {
        "architecture": calibration.architecture,
        "text_sha256": calibration.text_sha256,
        "date": calibration.date,
        "num_passes": len(trace.passes),
        "num_rows": len(trace.ids),
        "budgets": [budget._asdict() for budget in budgets],
        "gates": {name: _gate(calibration, gate) for gate, name in enumerate(GATES)},
        "previous_step": _by_size(previous_step(trace)),
        "token_share": token_share(calibration),
        "step_similarity": step_similarity(blocks),
        "distinct_experts": distinct_experts(blocks),
        **of_inputs,
    }


def token_share(calibration: Calibration) -> FloatArray:
    """Return each expert's share of a layer's (token, expert) pairs, [layers, experts]."""
    num_tokens = calibration.trace.hits().sum(axis=0)
    share: FloatArray = num_tokens / np.maximum(1, num_tokens.sum(axis=1, keepdims=True))
    return share


def check_plots(folder: Path) -> None:
    """Make the folder; raise UnsupportedError or StorageError if nothing can be drawn."""
    for name in (STEP_SIMILARITY, DISTINCT_EXPERTS):
        check_plot(folder / name)


def plot(calibration: Calibration, folder: Path) -> list[Path]:
    """Draw similarity and distinct experts by step into `folder`; return the files.

    Raises UnsupportedError without matplotlib, StorageError if a file cannot be written.
    """
    check_plots(folder)
    blocks = calibration.trace.blocks()
    apart = {f"{n} apart": (n, step_similarity(blocks, n)) for n in INTERVALS}
    each = {"all layers": (0, distinct_experts(blocks))}
    figures = {
        STEP_SIMILARITY: _figure("cosine of the hits of two steps", apart),
        DISTINCT_EXPERTS: _figure("experts activated per layer", each),
    }
    for name, figure in figures.items():
        save_figure(figure, folder / name)
    return [folder / name for name in figures]


def _budget(trace: Trace, hits: IntArray, num_residents: int, costs: Costs) -> Budget:
    layers, experts = trace.shape[:2]
    blocks = trace.blocks(hits)
    num_steps = round(float(np.mean([len(block) for block in blocks]))) if blocks else 1
    policy_inputs = PolicyInputs([num_residents] * layers, experts, costs)
    max_tau = min(max(TAUS), max(4, num_steps - 1))
    d, misses = drift(blocks, num_residents), miss_shares(blocks, num_residents, max_tau)
    return Budget(
        num_residents,
        d,
        misses.tolist(),
        paper_tau(d, misses, num_steps, num_residents, costs.fetch_s, costs.host_s.at(1)),
        fastest_tau(trace, "tide", policy_inputs),
    )


def _figure(label: str, curves: dict[str, tuple[int, FloatArray]]) -> Figure:
    """Draw curves over a block's steps, each from its first step on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, (first, values) in curves.items():
        axes.plot(range(first, first + len(values)), values, marker=".", label=name)
    axes.set_xlabel("step of the block")
    axes.set_ylabel(label)
    axes.legend()
    return figure


def _gate(calibration: Calibration, gate: int) -> dict[str, object]:
    accuracy = calibration.accuracy
    tops = _by_size(accuracy.top[gate])
    return {"routed": accuracy.routed[gate], **tops, "cosine": accuracy.cosine[gate]}


def _by_size(tops: FloatArray) -> dict[str, FloatArray]:
    """Map each of `TOP_SIZES` to its values by layer."""
    return {f"top_{n}": tops[:, i] for i, n in enumerate(TOP_SIZES)}


def _by_step(curves: Sequence[FloatArray]) -> FloatArray:
    """Average curves of different lengths, at each step over those that reach it."""
    longest = max(map(len, curves), default=0)
    total, count = np.zeros(longest), np.zeros(longest)
    for curve in curves:
        total[: len(curve)] += curve
        count[: len(curve)] += 1
    return total / count


def _cosines(a: IntArray, b: IntArray) -> FloatArray:
    """Return the cosine of hits [steps, layers, experts], averaged over layers, [steps]."""
    lengths = np.linalg.norm(a, axis=2) * np.linalg.norm(b, axis=2)
    cosines: FloatArray = ((a * b).sum(2) / lengths).mean(1)
    return cosines
