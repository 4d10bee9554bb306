"""Ling 2.0 (BailingMoeV2): LLaDA2's layers, autoregressive."""

from __future__ import annotations

from functools import partial

from lowtide.config import Published
from lowtide.families.bailing_moe_v2.gguf import GGUF
from lowtide.families.family import Family
from lowtide.families.llada2 import FAMILY as LLADA2
from lowtide.families.llada2 import read

FAMILY = Family(
    name="bailing_moe_v2",
    architectures=("BailingMoeV2ForCausalLM",),
    # LLaDA2's vocabulary, but 156895 is <|role_end|> here: ids belong to a family.
    published=Published(eos_token_ids=(156892,)),
    read=partial(read, can_stretch=True),
    schema=LLADA2.schema,
    decoder=LLADA2.decoder,
    gguf=GGUF,
    series=("bailingmoe2",),
)
