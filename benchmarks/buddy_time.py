"""Cost of a substitution itself in a layer of 256 experts, 8 a token, half of them resident.

Decided twice, on the router's demand and on what is run in its place, before the layer's work can
start; what it saved is counted beside that work. On the host alone and beside a device, where the
cost model asks an assignment which would be late. Seconds of the deciding thread's own time (it
does not wait): several means, and their median. All in a loop, which has it in the processor's
caches; `buddy_full.py` has what a decision takes between an engine's products.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from common.arguments import make_parser, run_script
from common.record import Recorder, Row, say

from lowtide.core import (
    NO_MOVES,
    Costs,
    Curve,
    Demand,
    Facts,
    PassRows,
    RoutedTokens,
    RowKind,
    Step,
    StepKind,
)
from lowtide.errors import InternalError
from lowtide.kernels.cpu.buddies import CompiledBuddies
from lowtide.kernels.cpu.library import load_part
from lowtide.kernels.cpu.sources import DECISIONS
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.policies.decision import Policies
from lowtide.policies.presets import make_policies, parse_options
from lowtide.policies.recipe import PolicyInputs

NUM_EXPERTS, K = 256, 8
NUM_LAYERS = 24
"""Layers of a pass, which share the cost of its beginning."""

BUDDYMOE = "buddymoe"
_UNGATED = {"k_max": "8", "tae": "off", "beta": "off"}
LANES: Mapping[str, Mapping[str, str]] = {
    "buddy": {**_UNGATED, "miss": "buddy", "max_mass": "off"},
    "buddy, max_mass": {**_UNGATED, "miss": "buddy", "max_mass": "0.05"},
    "late": {**_UNGATED, "miss": "late", "max_mass": "off"},
}
TIERS = {"host alone": False, "beside a device": True}

AT_ONE_S, LATE_S = 20e-6, 100e-6
"""Ceilings of a decision of one row, and of `late`'s two together."""


class Case(NamedTuple):
    """Policies, and the facts of all layers of a pass that they are asked of, over and over."""

    policies: Policies
    facts: list[Facts]
    runs: list[Facts]  # of what is run instead


def main() -> None:
    options = _options()
    named = ("rows", "means", "passes")
    recorder = Recorder("buddy time", {name: getattr(options, name) for name in named}, options.out)
    profile, twins = make_profile(), CompiledBuddies(load_part(DECISIONS))
    for (lane, chosen), (tier, has_device), num_rows in itertools.product(
        LANES.items(), TIERS.items(), options.rows
    ):
        case = make_case(chosen, has_device, num_rows, profile, twins)
        row = measure_case(case, options.means, options.passes)
        where: Row = {"lane": lane, "tier": tier, "num_rows": num_rows}
        recorder.write("substitution", {**where, **row, **judge(lane, num_rows, row)})
        say(
            f"{lane}, {tier}, {num_rows} rows: {row['substitute_us']:.0f} us, both decisions "
            f"{row['both_us']:.0f} us, what was saved {row['settle_us']:.0f} us"
        )


def judge(lane: str, num_rows: int, row: Mapping[str, float]) -> dict[str, bool]:
    judged = {}
    if num_rows == 1:
        judged["is_short_at_one"] = row["substitute_us"] <= 1e6 * AT_ONE_S
    if lane == "late":
        judged["are_both_short"] = row["both_us"] <= 1e6 * LATE_S
    return judged


def measure_case(case: Case, num_means: int, num_passes: int) -> dict[str, Any]:
    """Microseconds of a layer; each of `num_means` is of `num_passes`."""
    policies, facts, runs = case
    receipts = policies.receipts
    if receipts is None:
        raise InternalError("A policy that substitutes has receipts.")
    pairs = list(zip(facts, runs, strict=True))
    decided = [policies.decide(asked, run) for asked, run in pairs]

    def substitute() -> None:
        for asked in facts:
            policies.substitute(asked)

    def both() -> None:
        for asked, run in pairs:
            policies.substitute(asked)
            policies.decide(asked, run)

    def settle() -> None:
        for asked, decision in zip(facts, decided, strict=True):
            policies.settle(receipts, asked, decision, NO_MOVES)

    works = {"substitute_us": substitute, "both_us": both, "settle_us": settle}
    each = {name: _each_us(work, num_means, num_passes) for name, work in works.items()}
    row: dict[str, Any] = {f"each_{name}": means for name, means in each.items()}
    row |= {name: statistics.median(means) for name, means in each.items()}
    return row


def _each_us(work: Callable[[], object], num_means: int, num_passes: int) -> list[float]:
    """Return times of one layer, each a mean over passes."""
    work()
    means = []
    for _ in range(num_means):
        start_s = time.thread_time()
        for _ in range(num_passes):
            work()
        means.append(1e6 * (time.thread_time() - start_s) / num_passes / NUM_LAYERS)
    return means


def make_case(
    options: Mapping[str, str],
    has_device: bool,
    num_rows: int,
    profile: BuddyProfile,
    twins: CompiledBuddies,
) -> Case:
    """Routings of each of which something is replaced."""
    setting = PolicyInputs(
        [NUM_EXPERTS // 2] * NUM_LAYERS,
        NUM_EXPERTS,
        _costs(),
        options=parse_options(BUDDYMOE, options),
        buddies=profile,
        twins=twins,
    )
    policies = make_policies(BUDDYMOE, setting, everything_fits=False)
    draw = np.random.default_rng(0)
    is_here = np.arange(NUM_EXPERTS) % 2 == 0
    rows = PassRows(np.zeros(num_rows, np.int64), np.full(num_rows, RowKind.DECODE, np.uint8))
    step = Step(StepKind.DECODE, 1, rows)
    facts, runs = [], []
    while len(facts) < NUM_LAYERS:
        experts = np.sort(np.argsort(draw.random((num_rows, NUM_EXPERTS)), axis=1)[:, :K], axis=1)
        weights = draw.random((num_rows, K)).astype(np.float32) + np.float32(0.01)
        asked = _facts(step, len(facts), RoutedTokens(experts, weights), is_here, has_device)
        answer = policies.substitute(asked)
        if answer is not None:
            facts.append(asked)
            runs.append(_facts(step, asked.layer, answer, is_here, has_device))
    return Case(policies, facts, runs)


def _facts(
    step: Step, layer: int, routing: RoutedTokens, is_here: np.ndarray, has_device: bool
) -> Facts:
    num_tokens = np.bincount(routing.experts.ravel(), minlength=NUM_EXPERTS)
    experts = num_tokens.nonzero()[0]
    return Facts(
        step,
        layer,
        Demand(experts, num_tokens[experts], is_here[experts]),
        is_here,
        np.full(NUM_LAYERS, NUM_EXPERTS // 2),
        _costs(),
        can_fetch=has_device,
        has_idle_link=has_device,
        routing=routing,
        is_here=is_here,
    )


def _costs() -> Costs:
    """Everything that is not resident comes late."""
    slow, fast = Curve([(1, 4e-3), (64, 8e-3)]), Curve([(1, 1e-5), (64, 2e-5)])
    return Costs(1 << 20, 2e-3, slow, fast, fast, 0.0, num_staging=8)


def make_profile() -> BuddyProfile:
    """Make the profile of a router that chooses experts at random."""
    draw, num_tokens = np.random.default_rng(1), 4096
    chosen = np.zeros((num_tokens, NUM_EXPERTS), np.float32)
    experts = np.argsort(draw.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :K]
    np.put_along_axis(chosen, experts, 1, axis=1)
    together = (chosen.T @ chosen).astype(np.int64)
    activations = np.diagonal(together).copy()
    np.fill_diagonal(together, 0)
    weights = -np.sort(-draw.random((1, num_tokens, K)), axis=2)
    sample = (weights / weights.sum(axis=2, keepdims=True)).astype(np.float32)
    layers = [np.stack([one] * NUM_LAYERS) for one in (activations, together, sample[0])]
    return BuddyProfile("f" * 64, num_tokens, *layers)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="of a pass")
    parser.add_argument("--means", type=int, default=9, help="of one work")
    parser.add_argument("--passes", type=int, default=20, help="of each mean")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
