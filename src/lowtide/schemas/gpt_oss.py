"""Tensor names and shapes of gpt-oss checkpoints.

Experts of a layer are stacked, rows (or, unpacked, columns) of gate and up taking turns.
"""

from __future__ import annotations

from lowtide.config import ModelConfig
from lowtide.dtypes import MXFP4_BLOCK, PACKED_DTYPE
from lowtide.schemas.parts import decoder, separate_qkv, vector
from lowtide.schemas.schema import ExpertLayout, ModelSchema, PartSource, SlotTarget, TensorSpec

_GATE, _DOWN, _GATE_BIAS, _DOWN_BIAS = 0, 2, 3, 5  # parts of a slot: see SlotLayout
_EXPERTS = "model.layers.{layer}.mlp.experts."


def schema(config: ModelConfig) -> ModelSchema:
    layouts = (_mxfp4(config), _unpacked(config))
    published = layouts if config.has_mxfp4_experts else layouts[::-1]
    return decoder(config, _attention, _moe, layouts=published)


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    return [
        *separate_qkv(config, prefix),
        vector(prefix + "self_attn.o_proj.bias", config.hidden_size),
        vector(prefix + "self_attn.sinks", config.num_heads),
    ]


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    return [
        TensorSpec(prefix + "mlp.router.weight", (config.num_experts, config.hidden_size)),
        vector(prefix + "mlp.router.bias", config.num_experts),
    ]


def _mxfp4(config: ModelConfig) -> ExpertLayout:
    """As published: blocks of a row's weights, 16 bytes each, and a scale for every block."""
    hidden, width = config.hidden_size, config.expert_intermediate_size

    def packed(name: str, rows: int, columns: int) -> tuple[PartSource, PartSource]:
        num_blocks = columns // MXFP4_BLOCK
        return (
            _stacked(config, name + "_blocks", (rows, num_blocks, MXFP4_BLOCK // 2), PACKED_DTYPE),
            _stacked(config, name + "_scales", (rows, num_blocks), PACKED_DTYPE),
        )

    return ExpertLayout(
        "MXFP4",
        (
            *packed("gate_up_proj", 2 * width, hidden),
            _stacked(config, "gate_up_proj_bias", (2 * width,)),
            *packed("down_proj", hidden, width),
            _stacked(config, "down_proj_bias", (hidden,)),
        ),
        (
            SlotTarget(_GATE, num_parts=2, scales=1),
            None,
            SlotTarget(_GATE_BIAS, num_parts=2),
            SlotTarget(_DOWN, scales=4),
            None,
            SlotTarget(_DOWN_BIAS),
        ),
    )


def _unpacked(config: ModelConfig) -> ExpertLayout:
    """As transformers holds and saves them: matrices as [in, out]."""
    hidden, width = config.hidden_size, config.expert_intermediate_size
    return ExpertLayout(
        "unpacked (transformers)",
        (
            _stacked(config, "gate_up_proj", (hidden, 2 * width)),
            _stacked(config, "gate_up_proj_bias", (2 * width,)),
            _stacked(config, "down_proj", (width, hidden)),
            _stacked(config, "down_proj_bias", (hidden,)),
        ),
        (
            SlotTarget(_GATE, num_parts=2, is_transposed=True),
            SlotTarget(_GATE_BIAS, num_parts=2),
            SlotTarget(_DOWN, is_transposed=True),
            SlotTarget(_DOWN_BIAS),
        ),
    )


def _stacked(
    config: ModelConfig, name: str, shape: tuple[int, ...], dtype: str | None = None
) -> PartSource:
    return PartSource(_EXPERTS + name, shape, config.num_experts, dtype=dtype)
