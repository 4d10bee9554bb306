"""Baselines that BuddyMoE is compared with, as presets: `random`, `drop`, `cache-prior`.

Registered as a user's own preset would be; they make answers worse, so the package has none of
them. All leave rows of prompts and of finished blocks as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lowtide.config import ExpertSpec
from lowtide.core import BoolArray, Facts, FloatArray, IntArray, RoutedTokens, RowKind, WeightArray
from lowtide.policies.buddymoe import MAX_MASS, RHO
from lowtide.policies.presets import preset_names, recipe, register, unregister
from lowtide.policies.recipe import PolicyInputs, PolicyOption
from lowtide.policies.substitution import (
    Substitution,
    absent_experts,
    answer_of,
    in_order,
    replaced,
    stand_ins,
)

BASELINES = ("random", "drop", "cache-prior")
PRIOR = PolicyOption("prior", 1.0, 0, 1e6)
"""Constant that cache-prior adds to residents' logits."""


def register_baselines(placement: str, spec: ExpertSpec) -> None:
    """Register the three baselines over a preset's placement, in place of earlier ones.

    spec: how the model's router weighs its experts.
    """
    made: Mapping[str, Callable[[PolicyInputs], Substitution]] = {
        "random": lambda s: RandomBuddy(RHO.of(s), s.seed),
        "drop": lambda s: Drop(RHO.of(s)),
        "cache-prior": lambda s: CachePrior(PRIOR.of(s), spec),
    }
    base = recipe(placement)
    for name, substitution in made.items():
        if name in preset_names():
            unregister(name)
        changed = replace(
            base,
            options=(*base.options, RHO, MAX_MASS, PRIOR),
            weighs_moves=True,
            is_lossless=False,
            substitution=substitution,
            max_mass=MAX_MASS.of,
            asks_scores=name == "cache-prior",
        )
        register(name, changed)


class RandomBuddy:
    """Any resident outside the token's experts, drawn from a seed."""

    def __init__(self, rho: int | None, seed: int = 0) -> None:
        self._rho = rho
        self._draw = np.random.default_rng(seed)

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        return _replace_by_rank(facts, self._rho, lambda others: int(self._draw.choice(others)))


@dataclass(frozen=True, slots=True)
class Drop:
    """An absent expert adds nothing, and the other weights stay as they are.

    A token has k experts for all that comes after: a resident of weight 0 takes the place.
    """

    rho: int | None

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        run = _replace_by_rank(facts, self.rho, lambda others: int(others[0]))
        if run is None or facts.routing is None:
            return None
        return run._replace(weights=np.where(replaced(run, facts.routing), 0, run.weights))


@dataclass(frozen=True, slots=True)
class CachePrior:
    """Cache-conditional routing: raises residents' logits by a constant and chooses the best again.

    The weights come from the logits as they were. A router that chooses by more than its logits (a
    bias, groups) keeps its choice unless a resident's raised logit beats that of an absent choice:
    without those that is the same.
    """

    prior: float
    spec: ExpertSpec

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        routing = facts.routing
        if routing is None or routing.scores is None or self.prior <= 0:
            return None
        absent, here = absent_experts(facts), stand_ins(facts)
        may = _is_open(facts) & absent[routing.experts].any(axis=1)
        found, weights = routing.experts.copy(), routing.weights.copy()
        mass_left = None if facts.left is None else facts.left.mass.tolist()
        for token in may.nonzero()[0].tolist():
            logits = routing.scores[token].astype(np.float64)
            self._choose_again(found[token], logits, absent, here)
            moved = found[token] != routing.experts[token]
            mass = float(routing.weights[token][moved].sum(dtype=np.float64))
            if mass_left is not None and facts.left is not None:  # all of a token or nothing
                owner = facts.left.owner[token]
                if mass > mass_left[owner]:
                    found[token] = routing.experts[token]
                    continue
                mass_left[owner] -= mass
            if moved.any():
                weights[token] = weights_of(self.spec, logits, found[token])
        return in_order(found, weights) if (found != routing.experts).any() else None

    def _choose_again(
        self, chosen: IntArray, logits: FloatArray, absent: BoolArray, here: BoolArray
    ) -> None:
        """The weakest absent choice against the strongest resident that is not chosen, and on."""
        places = absent[chosen].nonzero()[0]
        places = places[np.argsort(logits[chosen[places]], kind="stable")]
        others = here.copy()
        others[chosen] = False
        rivals = others.nonzero()[0]
        rivals = rivals[np.argsort(-logits[rivals], kind="stable")]
        for place, rival in zip(places, rivals, strict=False):
            if logits[rival] + self.prior <= logits[chosen[place]]:
                return
            chosen[place] = rival


def weights_of(spec: ExpertSpec, logits: FloatArray, chosen: IntArray) -> WeightArray:
    """A router's weights of one token: logits [experts], chosen [k] -> [k]."""
    if spec.score_function == "sigmoid":
        score = 1 / (1 + np.exp(-logits))
    else:
        score = np.exp(logits - logits.max())
        score /= score.sum()
    weights = score[chosen]
    if spec.norm_topk_prob:
        weights /= weights.sum() + 1e-20
    scaled: WeightArray = (weights * spec.scaling_factor).astype(np.float32)
    return scaled


def _is_open(facts: Facts) -> BoolArray:
    """Rows whose outcome does not last. [tokens]."""
    assert facts.routing is not None
    kinds = facts.step.rows_of(len(facts.routing.weights)).kind
    return ~np.isin(kinds, (RowKind.PROMPT, RowKind.COMMIT))


def _replace_by_rank(
    facts: Facts, rho: int | None, stand_in: Callable[[IntArray], int]
) -> RoutedTokens | None:
    """`stand_in` chooses of the residents outside a token's experts, for each absent one."""
    routing = facts.routing
    if routing is None:
        return None
    may = absent_experts(facts)[routing.experts] & _is_open(facts)[:, None]
    found = routing.experts.copy()
    most = max(1, may.shape[1] // 2) if rho is None else rho
    for token in np.flatnonzero(may.any(axis=1)).tolist():
        others = stand_ins(facts).copy()
        others[routing.experts[token]] = False
        ranks = np.argsort(-routing.weights[token], kind="stable")
        for place in ranks[may[token, ranks]][:most].tolist():
            candidates = others.nonzero()[0]
            if not len(candidates):
                break
            found[token, place] = stand_in(candidates)
            others[found[token, place]] = False
    return answer_of(routing, found, facts.left)
