"""Buddies of a model, layer by layer: any substitution needs them, and a model may have none.

How unevenly experts are chosen (BuddyMoE's Figure 6), how few peers they are chosen with, and how
many peers cover how much of that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common.arguments import make_parser, run_script
from common.buddies import calibrated
from common.models import demos
from common.record import Recorder, Row

from lowtide.lab.buddy_report import layer_reports
from lowtide.policies.buddy_profile import BuddyProfile

CONTEXT = 512
ALPHAS = (0.5, 0.75, 0.9, 0.95, 0.99)


def main() -> None:
    options = _options()
    recorder = Recorder("buddy profile", {"pieces": options.pieces}, options.out)
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            profile = calibrated(model, Path(folder) / "buddies", options.pieces, context=CONTEXT)
        for layer, row in enumerate(layer_rows(profile)):
            facts: Row = {
                "model": Path(model).name,
                "layer": layer,
                "num_tokens": profile.num_tokens,
            }
            recorder.write("layer", {**facts, **row})


def layer_rows(profile: BuddyProfile) -> Iterator[Row]:
    """Yield the row of each MoE layer."""
    peers = {alpha: profile.peers_that_cover(alpha) for alpha in ALPHAS}
    for layer, report in enumerate(layer_reports(profile)):
        counts = profile.activations[layer] / profile.activations[layer].mean()
        is_seen = profile.activations[layer] > 0
        yield {
            "num_experts": profile.num_experts,
            "concentration": report.concentration,
            "affinity_nats": report.affinity,
            "top_peers": report.top_peers,
            "num_unseen": report.num_unseen,
            "most_chosen": float(counts.max()),
            "least_chosen": float(counts.min()),
            "chosen_deviation": float(np.std(counts)),
            "peers_of_alpha": {
                f"{alpha:g}": float(num[layer][is_seen].mean()) for alpha, num in peers.items()
            },
        }


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=demos())
    parser.add_argument("--pieces", type=int, default=64, help="of the calibration's text")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
