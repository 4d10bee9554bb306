"""Buddy statistics counted slowly, one token and one pair at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.policies.buddy_profile import BuddyProfile


def direct_profile(
    routed: list[tuple[NDArray[Any], NDArray[Any]]], num_experts: int, **rest: Any
) -> BuddyProfile:
    """Of each layer's ids and weights [tokens, k]."""
    layers, (tokens, k) = len(routed), routed[0][0].shape
    activations = np.zeros((layers, num_experts), np.int64)
    together = np.zeros((layers, num_experts, num_experts), np.int64)
    sample = np.zeros((layers, tokens, k), np.float32)
    for layer, (ids, weights) in enumerate(routed):
        for token in range(tokens):
            p = weights[token].astype(np.float64) / weights[token].astype(np.float64).sum()
            sample[layer, token] = sorted(p, reverse=True)
            for a in range(k):
                activations[layer, ids[token, a]] += 1
                for b in range(k):
                    if a != b:
                        together[layer, ids[token, a], ids[token, b]] += 1
    return BuddyProfile("00ff", tokens, activations, together, sample, **rest)


def random_routing(
    seed: int, num_layers: int, num_experts: int, k: int, num_tokens: int
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Skewed, ids ascending: what a router might choose."""
    draw = np.random.default_rng(seed)
    routed = []
    for _ in range(num_layers):
        logits = draw.normal(size=(num_tokens, num_experts)) + draw.normal(size=num_experts)
        ids = np.sort(np.argsort(-logits, axis=1)[:, :k], axis=1)
        weights = np.exp(np.take_along_axis(logits, ids, 1)).astype(np.float32)
        routed.append((ids, weights))
    return routed
