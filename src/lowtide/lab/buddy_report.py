"""What a buddy profile says: lists, how concentrated co-activation is, and pictures of both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import FloatArray, IntArray
from lowtide.lab.calibration_report import check_plots
from lowtide.lab.plotting import save_figures
from lowtide.policies.buddy_lists import prefix_lengths
from lowtide.policies.buddy_profile import BuddyProfile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP_PEERS = 4
ENTROPY_PERCENTILES = (10, 20)
"""That the paper picks the entropy gate's threshold from (section 3.1)."""
ALPHAS = (0.5, 0.75, 0.9, 0.95, 0.99)
MAX_MAPS = 12
"""Layers of which maps are drawn: evenly spread, the first and the last among them."""


class Likeness(NamedTuple):
    """How alike the outputs of one layer's experts are: cosines, and whether lists find them."""

    pairs: float  # mean over all pairs
    first_buddy: float  # of an expert with the first of its list, in the mean
    most_alike: float  # with which it is most alike
    correlation: float  # Spearman's, over all pairs, of the cosine with q(j|i)


class LayerReport(NamedTuple):
    """What the buddy profile says of one MoE layer."""

    alpha: float
    reaches_alpha: float  # peers that it takes, in the mean over experts that were seen
    list_length: float  # of them in the list, which `k_max` cuts
    num_unseen: int  # experts that no token chose: they have no buddies
    top_peers: float  # share of an expert's co-activations with its 4 foremost peers
    concentration: float
    affinity: float  # nats
    likeness: Likeness | None  # where outputs were compared
    entropy: tuple[float, ...]  # TAE at `ENTROPY_PERCENTILES`


def layer_reports(profile: BuddyProfile) -> list[LayerReport]:
    """A report for each layer, by the calibration's rule."""
    rule, lists = profile.rule, profile.lists()
    lengths = prefix_lengths(profile.q(rule.ranking, rule.smoothing), lists.alphas)
    concentration, affinity = profile.concentration(), profile.affinity()
    alike = likeness(profile)
    tops = top_peers(profile)
    entropies = [profile.entropy_threshold(each) for each in ENTROPY_PERCENTILES]
    return [
        LayerReport(
            alpha=float(lists.alphas[layer]),
            reaches_alpha=float(lengths[layer][is_seen].mean()),
            list_length=float(lists.lengths[layer][is_seen].mean()),
            num_unseen=int((~is_seen).sum()),
            top_peers=float(tops[layer]),
            concentration=float(concentration[layer]),
            affinity=float(affinity[layer]),
            likeness=None if alike is None else alike[layer],
            entropy=tuple(float(each[layer]) for each in entropies),
        )
        for layer, is_seen in enumerate(profile.activations > 0)
    ]


def as_object(profile: BuddyProfile) -> dict[str, object]:
    """All of it for `--json`."""
    rule = profile.rule
    return {
        "fingerprint": profile.fingerprint,
        "num_tokens": profile.num_tokens,
        "k_max": rule.k_max,
        "ranking": rule.ranking.value,
        "smoothing": rule.smoothing,
        "layers": [_layer_object(report) for report in layer_reports(profile)],
        "list_lengths": profile.lists().lengths,
    }


def _layer_object(report: LayerReport) -> dict[str, object]:
    alike = report.likeness
    return {**report._asdict(), "likeness": None if alike is None else alike._asdict()}


def likeness(profile: BuddyProfile) -> list[Likeness] | None:
    """By layer; None where outputs were not compared."""
    if profile.output_similarity is None:
        return None
    is_pair = ~np.eye(profile.num_experts, dtype=bool)
    q, first = profile.q(smoothing=0.0), profile.lists().ids[:, :, 0]
    found = []
    for layer, cosines in enumerate(profile.output_similarity.astype(np.float64)):
        is_seen = first[layer] >= 0
        to_first = cosines[is_seen, first[layer][is_seen]]
        most = np.where(is_pair, cosines, -1)[is_seen].max(axis=1)
        ranks = _ranks(cosines[is_pair]), _ranks(q[layer][is_pair])
        found.append(
            Likeness(
                pairs=float(cosines[is_pair].mean()),
                first_buddy=float(to_first.mean()),
                most_alike=float(most.mean()),
                correlation=float(np.corrcoef(*ranks)[0, 1]),
            )
        )
    return found


def top_peers(profile: BuddyProfile) -> FloatArray:
    """Share of an expert's co-activations with its 4 foremost peers. [layers]"""
    q = -np.sort(-profile.q(smoothing=0.0), axis=2)[:, :, :TOP_PEERS].sum(axis=2)
    weight = profile.together.sum(axis=2)
    share: FloatArray = (q * weight).sum(axis=1) / weight.sum(axis=1)
    return share


def peers_that_reach(profile: BuddyProfile, alpha: float | FloatArray) -> list[IntArray]:
    """For each layer, how many peers each expert that was seen takes to cover alpha, which is one
    for all layers or [layers]."""
    alphas = np.broadcast_to(alpha, profile.num_layers)
    lengths = prefix_lengths(profile.q(profile.rule.ranking, profile.rule.smoothing), alphas)
    return [one[is_seen] for one, is_seen in zip(lengths, profile.activations > 0, strict=True)]


def plot(profile: BuddyProfile, folder: Path) -> list[Path]:
    """Draws lists, activations and maps of experts chosen together into `folder`; the files.

    Raises as `calibration_report.plot` does.
    """
    check_plots(folder)
    figures = {
        "buddy-list-sizes.png": _list_figure(profile),
        "expert-activations.png": _activation_figure(profile),
        "co-activation.png": _maps(profile.q(smoothing=0.0), "q(j|i)"),
    }
    if profile.output_similarity is not None:
        figures["output-similarity.png"] = _maps(profile.output_similarity, "cosine of outputs")
    if profile.weight_similarity is not None:
        figures["weight-similarity.png"] = _maps(profile.weight_similarity, "cosine of weights")
    return save_figures(figures, folder)


def drawn_layers(num_layers: int) -> list[int]:
    """The layers that maps are drawn of."""
    layers = np.linspace(0, num_layers - 1, min(MAX_MAPS, num_layers)).round()
    drawn: list[int] = layers.astype(int).tolist()
    return drawn


def _ranks(values: FloatArray) -> FloatArray:
    """The rank of each value, from 1; equal values get their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = count.cumsum()
    ranks: FloatArray = (last - (count - 1) / 2)[place]
    return ranks


def _list_figure(profile: BuddyProfile) -> Figure:
    """How many peers reach the rule's alpha, where lists are cut, and how alpha changes that."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    layers, rule = list(range(profile.num_layers)), profile.rule
    left.boxplot(peers_that_reach(profile, rule.alphas(len(layers))), positions=layers, widths=0.6)
    left.axhline(rule.k_max, linestyle="--", label=f"cut at {rule.k_max}")
    left.set_title("peers that reach the calibration's alpha")
    for alpha in ALPHAS:
        lengths = peers_that_reach(profile, alpha)
        right.plot(layers, [one.mean() for one in lengths], marker=".", label=f"alpha {alpha:g}")
    right.set_title("the mean, for other alphas")
    left.set_ylabel("peers of an expert")
    left.set_ylim(0, profile.num_experts)
    for axes in (left, right):
        axes.set_xlabel("MoE layer")
        axes.legend()
    return figure


def _activation_figure(profile: BuddyProfile) -> Figure:
    """Each layer's experts by how often they were chosen, most often first (Fig. 6)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for layer in drawn_layers(profile.num_layers):
        counts = np.sort(profile.activations[layer])[::-1]
        axes.plot(counts / counts.mean(), label=f"layer {layer}")
    axes.set_xlabel("expert, most chosen first")
    axes.set_ylabel("tokens over the layer's mean")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _maps(pairs: NDArray[np.floating], label: str) -> Figure:
    """[layers, experts, experts], the diagonal left white, one scale for all (Figs. 4 and 9)."""
    from matplotlib.figure import Figure

    drawn = drawn_layers(len(pairs))
    num_columns = min(4, len(drawn))
    num_rows = -(-len(drawn) // num_columns)
    figure = Figure(figsize=(3 * num_columns + 1, 3 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    is_self = np.eye(pairs.shape[1], dtype=bool)
    shown = np.where(is_self, np.nan, pairs[drawn])
    low, high = float(np.nanmin(shown)), float(np.nanmax(shown))
    for axes, layer, values in zip(grid, drawn, shown, strict=False):
        image = axes.imshow(values, vmin=low, vmax=high, interpolation="nearest")
        axes.set_title(f"layer {layer}")
    for axes in grid[len(drawn) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=grid.tolist(), label=label)
    figure.supxlabel("buddy j")
    figure.supylabel("expert i")
    return figure
