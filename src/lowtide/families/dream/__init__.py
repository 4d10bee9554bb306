"""Dream (7B) and relatives such as DiffuCoder: `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import Canvas, DecodingDefaults, ModelConfig, Published, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families.family import Family
from lowtide.schemas.parts import decoder, in_layers, separate_qkv
from lowtide.schemas.schema import ModelSchema

LOGITS_SHIFT = 1
"""A hidden state predicts the next position: training began with an autoregressive model."""


def read(fields: Fields, origin: Origin) -> ModelConfig:
    keys.refuse_sliding_windows(fields)
    fields.only("use_mrope", False)
    fields.refuse("block_size")  # set by relatives that decode in blocks without a shift
    return keys.decoder(
        fields,
        origin,
        keys.grouped_attention(fields, has_qkv_bias=True),
        None,
        keys.width(fields, "intermediate_size"),
    )


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, separate_qkv, absent=in_layers(config, "self_attn.o_proj.bias"))


FAMILY = Family(
    name="dream",
    architectures=("DreamModel",),
    published=Published(
        (151643,),
        Canvas(
            mask_token_id=151666,
            logits_shift=LOGITS_SHIFT,
            defaults=DecodingDefaults(
                block_length=None, steps=512, threshold=None, remasking="origin", eps=1e-3
            ),
            is_measured_as_drawn=True,
        ),
    ),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Dream",
)
