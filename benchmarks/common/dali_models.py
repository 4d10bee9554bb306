"""DALI's three models at their published dimensions, its parts one by one, and runs of them.

No weights of these sizes are here, so routing is synthetic: half of a token's preference is its
sequence's own and half the model's, which alone a calibration on other sequences can know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from common.simulated import make_setting, published, trace_shape
from common.synth_trace import synth_decode_trace
from lowtide.core import Costs, MoEShape
from lowtide.policies.assignment import Greedy
from lowtide.policies.catalogue import NUM_PREFETCH
from lowtide.policies.placement import Static
from lowtide.policies.prefetch import Residual
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs, Recipe
from lowtide.replay.trace import Trace

RESIDENT_SHARE = 0.5
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "decode": {"layer-split": 3.97, "moe-lightning": 1.48, "hybrimoe": 1.32},
    "prefill": {"layer-split": 7.62, "moe-lightning": 2.45, "hybrimoe": 2.00},
}
"""DALI's own speed over each, as its paper reports it (means over its models and batches;
prefill on DeepSeek-V2-Lite only). Its layer-wise splits: llama.cpp here, KTransformers 2.16 and
3.80."""
STAGES: Mapping[str, Recipe] = {
    "all on the host": recipe("all-host"),
    "+ greedy": Recipe(lambda s: Static.first(_no_residents(s), s.num_experts), lambda s: Greedy()),
    "+ prefetch": Recipe(
        lambda s: Static.first(_no_residents(s), s.num_experts),
        lambda s: Greedy(),
        lambda s: Residual(NUM_PREFETCH.of(s)),
    ),
    "+ cache": recipe("dali"),
}
"""DALI's Figure 19, in its order: no expert is resident before the cache comes."""
STAGE_SHARE = 0.25
STAGE_PREFETCH = {"Qwen3-30B-A3B": 8, "Mixtral-8x7B": 1}
"""Figure 19's cache ratio and prefetch sizes; DeepSeek-V2-Lite keeps those of Figure 12."""


def _no_residents(setting: PolicyInputs) -> list[int]:
    return [0] * setting.num_layers


class Model(NamedTuple):
    """A model and DALI's options for it."""

    family: str
    options: Mapping[str, int]

    @property
    def shape(self) -> MoEShape:
        return published(self.family)


MODELS = {
    "Qwen3-30B-A3B": Model("qwen3_moe", {"num_prefetch": 4, "u_size": 8}),
    "DeepSeek-V2-Lite": Model("deepseek_v2", {"num_prefetch": 4, "u_size": 8}),
    "Mixtral-8x7B": Model("mixtral", {"num_prefetch": 1, "u_size": 1}),
}


class Load(NamedTuple):
    """A batch and its answer's length."""

    num_sequences: int
    num_prompt: int
    num_new: int


def make_case(
    model: Model, costs: Costs, load: Load, preference: float, num_layers: int | None = None
) -> tuple[Trace, PolicyInputs]:
    """A run, and the setting that other sequences of the same model calibrate."""
    shape = trace_shape(model.shape)
    if num_layers is not None:
        shape = shape._replace(num_layers=num_layers)
    trace, known = (
        synth_decode_trace(
            shape,
            num_sequences=load.num_sequences,
            num_prompt=load.num_prompt,
            num_new=load.num_new,
            skew=preference,
            taste=preference,
            text=text,
        )
        for text in (0, 1)
    )
    num_residents = round(RESIDENT_SHARE * shape.num_experts)
    setting = make_setting(trace, costs, num_residents, known)
    return trace, setting.having(**model.options)
