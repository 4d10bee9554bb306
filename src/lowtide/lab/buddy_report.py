"""Summary of a buddy profile, layer by layer: lists, and concentration of co-activation."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.policies.buddy_profile import BuddyProfile

TOP_PEERS = 4
ENTROPY_PERCENTILES = (10, 20)
"""Percentiles from which the paper chooses the entropy gate's threshold (section 3.1)."""


class LayerReport(NamedTuple):
    """Summary of one MoE layer's buddies; means are over experts that were seen."""

    reaches_alpha: float  # peers that cover the layer's alpha
    list_length: float  # of them in the list, which the default `k_max` cuts
    num_unseen: int  # experts that no token chose: they have no buddies
    top_peers: float  # share of an expert's co-activations with its 4 foremost peers
    concentration: float
    affinity: float  # nats
    entropy: tuple[float, ...]  # TAE at `ENTROPY_PERCENTILES`
    alpha: float


def layer_reports(profile: BuddyProfile) -> list[LayerReport]:
    num_peers, lengths = profile.peers_that_cover(), (profile.lists() >= 0).sum(axis=2)
    concentration, affinity = profile.concentration(), profile.affinity()
    tops = profile.top_peers(TOP_PEERS)
    entropies = [profile.entropy_threshold(each) for each in ENTROPY_PERCENTILES]
    alphas = profile.alpha_of_layers()
    return [
        LayerReport(
            reaches_alpha=float(num_peers[layer][is_seen].mean()),
            list_length=float(lengths[layer][is_seen].mean()),
            num_unseen=int((~is_seen).sum()),
            top_peers=float(tops[layer]),
            concentration=float(concentration[layer]),
            affinity=float(affinity[layer]),
            entropy=tuple(float(each[layer]) for each in entropies),
            alpha=alphas[layer],
        )
        for layer, is_seen in enumerate(profile.activations > 0)
    ]


def as_object(profile: BuddyProfile) -> dict[str, object]:
    """Return everything for `--json`."""
    return {
        "fingerprint": profile.fingerprint,
        "num_tokens": profile.num_tokens,
        "layers": [report._asdict() for report in layer_reports(profile)],
    }
