"""gpt-oss (20b and 120b): `config.json`, tensors, sizes.

A layer's experts are stacked, with interleaved rows (unpacked: columns) of gate and up.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.config import LayerSpec, ModelConfig, Published, keys
from lowtide.config.fields import MAX_POSITIONS, Fields
from lowtide.config.keys import Origin
from lowtide.errors import ConfigError
from lowtide.families.family import Family
from lowtide.families.gpt_oss.gguf import GGUF
from lowtide.formats import mxfp4
from lowtide.schemas.parts import decoder, separate_qkv, vector
from lowtide.schemas.schema import ExpertStorage, ModelSchema, PartSource, SlotTarget, TensorSpec

_GATE, _DOWN, _GATE_BIAS, _DOWN_BIAS = 0, 2, 3, 5  # parts of a slot: see ExpertLayout
_EXPERTS = "model.layers.{layer}.mlp.experts."


def read(fields: Fields, origin: Origin) -> ModelConfig:
    fields.only("attention_bias", True)
    fields.only("swiglu_alpha", 1.702)
    fields.only("swiglu_limit", 7.0)
    # Without either, transformers stretches the rotary embedding by numbers of its own.
    if not fields.raw("rope_parameters") and not fields.raw("rope_scaling"):
        raise ConfigError("config.json has no rope_parameters or rope_scaling.")
    expert_size, windows = keys.width(fields, "intermediate_size"), _windows(fields)
    experts = keys.experts(
        fields,
        expert_size,
        norm_topk_prob=True,
        activation="clamped",
        is_mxfp4=_is_mxfp4(fields, expert_size),
    )
    attention = keys.grouped_attention(fields, can_stretch=True, has_qkv_bias=True)
    kinds = {window: LayerSpec(replace(attention, window=window), experts) for window in windows}
    return keys.layered(fields, origin, [kinds[window] for window in windows])


def _is_mxfp4(fields: Fields, expert_size: int) -> bool:
    """Return True if experts are published in MXFP4."""
    quantised = fields.raw("quantization_config")
    if quantised is None:
        return False
    if not isinstance(quantised, dict):
        raise fields.error("quantization_config", "must be an object")
    Fields(quantised, "quantization_config.").only("quant_method", "mxfp4")
    hidden_size = keys.width(fields, "hidden_size")
    for size in (hidden_size, expert_size):
        if size % mxfp4.BLOCK:
            raise ConfigError(
                f"config.json: MXFP4 experts of {hidden_size} by {expert_size} weights do not "
                f"divide into blocks of {mxfp4.BLOCK}."
            )
    return True


def _windows(fields: Fields) -> tuple[int, ...]:
    """Return each layer's sliding window; by default every other layer has one."""
    window = fields.integer("sliding_window", low=1, high=MAX_POSITIONS, default=128)
    usual = [0 if layer % 2 else window for layer in range(keys.num_layers(fields))]
    return keys.layer_windows(fields, window, usual)


def schema(config: ModelConfig) -> ModelSchema:
    both = (_mxfp4(config), _unpacked(config))
    published = both if config.moe.is_mxfp4 else both[::-1]
    return decoder(config, _attention, _moe, storages=(*published, *_apart(config)))


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    return [
        *separate_qkv(config, prefix),
        vector(prefix + "self_attn.o_proj.bias", config.hidden_size),
        vector(prefix + "self_attn.sinks", config.attention.num_heads),
    ]


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    return [
        TensorSpec(
            prefix + "mlp.router.weight",
            (config.moe.num_experts, config.hidden_size),
            keeps_type=True,
        ),
        vector(prefix + "mlp.router.bias", config.moe.num_experts),
    ]


def _mxfp4(config: ModelConfig) -> ExpertStorage:
    """Describe the published storage: blocks of 32 weights in 16 bytes, and their scales."""
    hidden, width = config.hidden_size, config.moe.expert_size

    def packed(name: str, rows: int, columns: int) -> tuple[PartSource, PartSource]:
        num_blocks = columns // mxfp4.BLOCK
        return (
            _stacked(
                config, name + "_blocks", (rows, num_blocks, mxfp4.BLOCK // 2), mxfp4.TENSOR_DTYPE
            ),
            _stacked(config, name + "_scales", (rows, num_blocks), mxfp4.TENSOR_DTYPE),
        )

    return ExpertStorage(
        "MXFP4",
        (
            *packed("gate_up_proj", 2 * width, hidden),
            _stacked(config, "gate_up_proj_bias", (2 * width,)),
            *packed("down_proj", hidden, width),
            _stacked(config, "down_proj_bias", (hidden,)),
        ),
        (
            SlotTarget(_GATE, num_parts=2, format=mxfp4.NAME, others=(1,)),
            None,
            SlotTarget(_GATE_BIAS, num_parts=2),
            SlotTarget(_DOWN, format=mxfp4.NAME, others=(4,)),
            None,
            SlotTarget(_DOWN_BIAS),
        ),
    )


def _unpacked(config: ModelConfig) -> ExpertStorage:
    """Describe transformers' own storage: matrices as [in, out]."""
    hidden, width = config.hidden_size, config.moe.expert_size
    return ExpertStorage(
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


def _apart(config: ModelConfig) -> tuple[ExpertStorage, ExpertStorage]:
    """Describe GGUF storage: a tensor for each part of a slot, or gate's and up's rows in one."""
    hidden, width = config.hidden_size, config.moe.expert_size
    shapes = {
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    biases = {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
    apart = [_stacked(config, name, shape) for name, shape in {**shapes, **biases}.items()]
    gate = _stacked(config, "gate_then_up_proj", (width, hidden))._replace(num_fused=2)
    fused = [gate, gate._replace(position=1), *apart[2:]]
    targets = tuple(SlotTarget(i) for i in range(len(apart)))
    return (
        ExpertStorage("gate and up apart (GGUF)", tuple(apart), targets),
        ExpertStorage("gate and then up (GGUF)", tuple(fused), targets),
    )


def _stacked(
    config: ModelConfig, name: str, shape: tuple[int, ...], dtype: str | None = None
) -> PartSource:
    return PartSource(_EXPERTS + name, shape, config.moe.num_experts, dtype=dtype)


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    published=Published(eos_token_ids=(200002,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:GptOss",
    gguf=GGUF,
)
