"""Model families in GGUF files: metadata keys and tensor names, as data.

A family's `gguf.py` has one `GgufArchitecture`, which converts metadata to `config.json` and maps
tensor names. Facts from llama.cpp's converter and its `gguf` package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from lowtide.config import ModelConfig
from lowtide.config.fields import MAX_LAYERS, OTHER_MODEL
from lowtide.config.rope import PairDivisors
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.families.unsupported import another_of
from lowtide.files.json_file import listed, shown
from lowtide.model_folder.checkpoint import ArrayView
from lowtide.model_folder.gguf_header import GgufArray

_NUMBER = re.compile(r"\.[0-9]+(?=\.)")

Value = object  # of one key of a file's metadata


class RearrangedTensor(NamedTuple):
    """A tensor whose layout in the file differs from memory, or that is part of one in memory."""

    name: str
    view: Callable[[ModelConfig], ArrayView]


Names = Mapping[str, str | RearrangedTensor]
"""Our names by the file's, with `#` for a layer's number in both."""

ENDS: Names = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

NORMS: Names = {
    "blk.#.attn_norm.weight": "model.layers.#.input_layernorm.weight",
    "blk.#.ffn_norm.weight": "model.layers.#.post_attention_layernorm.weight",
}

QKV: Names = {f"blk.#.attn_{x}.weight": f"model.layers.#.self_attn.{x}_proj.weight" for x in "qkv"}

QKV_BIASES: Names = {
    f"blk.#.attn_{x}.bias": f"model.layers.#.self_attn.{x}_proj.bias" for x in "qkv"
}

FUSED_QKV = ".attn_qkv."
"""Part of the names of fused tensors: rows of queries, of keys, then of values.

llama.cpp accepts them in place of the three for any architecture.
"""

OUTPUT: Names = {"blk.#.attn_output.weight": "model.layers.#.self_attn.o_proj.weight"}

OUTPUT_BIAS: Names = {"blk.#.attn_output.bias": "model.layers.#.self_attn.o_proj.bias"}

QK_NORMS: Names = {
    f"blk.#.attn_{x}_norm.weight": f"model.layers.#.self_attn.{x}_norm.weight" for x in "qk"
}

ROUTER: Names = {"blk.#.ffn_gate_inp.weight": "model.layers.#.mlp.gate.weight"}


def mlp(there: str, here: str) -> Names:
    """Return the names of a gated MLP.

    there: suffix of `ffn_gate` etc.
    here: prefix of our names.
    """
    return {
        f"blk.#.ffn_{part}{there}.weight": f"model.layers.#.{here}{part}_proj.weight"
        for part in ("gate", "up", "down")
    }


EXPERTS: Names = {
    f"blk.#.ffn_{part}_exps.weight": f"model.layers.#.mlp.experts.{part}_proj"
    for part in ("gate", "up", "gate_up", "down")
}
"""Stacked experts; gate and up may be one matrix, gate's rows first."""

ROPE_DIVISORS = "rope_freqs.weight"
"""Tensor of divisors for the frequency of each pair of dimensions."""

USUAL: Names = {**ENDS, **NORMS, **QKV, **OUTPUT, **ROUTER, **EXPERTS}

DENSE: Names = {**ENDS, **NORMS, **QKV, **OUTPUT, **mlp("", "mlp.")}
"""Decoders without experts."""


class GgufKeys:
    """A file's metadata, keyed without the architecture's prefix, and the shapes of its tensors."""

    def __init__(
        self,
        architecture: str,
        metadata: Mapping[str, Value],
        shapes: Mapping[str, tuple[int, ...]],
        vector: Callable[[str], list[float]] = lambda name: [],
    ) -> None:
        """vector: reads the numbers of a short tensor that exists."""
        self._prefix = f"{architecture}."
        self._metadata = metadata
        self.shapes = shapes  # of tensors, by the file's names
        self.vector = vector

    def get(self, key: str) -> Value | None:
        return self._metadata.get(self._prefix + key)

    def need(self, key: str) -> Value:
        """Return a required value; raises ConfigError if it is missing."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"the metadata has no {self._prefix}{key}.")
        return value

    def even(self, key: str, may_lack: bool = False) -> Value | None:
        """Return a value that some files have as an array, with one number for each layer.

        may_lack: some layers may have 0 instead. Raises UnsupportedError if these numbers differ.
        """
        return None if self.get(key) is None else self.need_even(key, may_lack)

    def need_even(self, key: str, may_lack: bool = False) -> Value:
        """Return a required value as `even` does; raises ConfigError too if it is missing."""
        value = self.need(key)
        if not isinstance(value, GgufArray):
            return value
        numbers = set(self.of_layers(key))
        if may_lack and len(numbers) > 1:
            numbers.discard(0)
        if len(numbers) != 1:
            raise UnsupportedError(
                f"{self._prefix}{key} differs between layers, which this family's do not: "
                f"{listed([*map(str, sorted(numbers))])}; {OTHER_MODEL}."
            )
        return numbers.pop()

    def of_layers(self, key: str) -> list[int | float]:
        """Return a number for each layer, whether the file has an array or one for all of them.

        Raises ConfigError if it is missing, or not as many.
        """
        value, count = self.need(key), self.integer_within("block_count", 1, MAX_LAYERS)
        if not isinstance(value, GgufArray):
            return [self.integer(key)] * count
        if value.is_text or value.num_elements != count:
            raise self.error(key, f"must be a number, or one for each of {count} layers")
        return value.numbers()

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; raises ConfigError if it is missing and has no default."""
        value = self.get(key) if default is not None else self.need(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, "must be an integer")
        return value

    def integer_within(self, key: str, low: int, high: int) -> int:
        """Return an integer from `low` to `high`; raises ConfigError for anything else."""
        value = self.integer(key)
        if not low <= value <= high:
            raise self.error(key, f"must be an integer from {low} to {high}")
        return value

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._prefix}{key} {shown(self.get(key))} {problem}.")

    def only(self, key: str, *supported: Value) -> None:
        """Refuse values other than the supported ones."""
        value = self.get(key)
        if value is not None and value not in supported:
            raise UnsupportedError(
                f"{self._prefix}{key} {shown(value)} is not supported, only "
                f"{' and '.join(map(shown, supported))}."
            )

    def refuse(self, usual: str) -> NoReturn:
        """Refuse a model that shares the architecture's name but not its computation.

        The message describes the series that its name tells, or the `usual` one.
        """
        names = [name for name in map(self._metadata.get, _NAME_KEYS) if isinstance(name, str)]
        name, said = shown(self._prefix.removesuffix(".")), another_of(names, usual)
        raise UnsupportedError(f"the architecture {name} is not computed for this model. {said}")


def own_name(metadata: Mapping[str, object]) -> str:
    """Return the model's own name in a GGUF file, as the end of a message."""
    names = [name for name in map(metadata.get, _NAME_KEYS) if isinstance(name, str) and name]
    return f" The file calls its model {shown(names[-1])}." if names else ""


_NAME_KEYS = ("general.basename", "general.name")

Config = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """A family under its GGUF name, which other families may share.

    config: converts metadata to the keys of `config.json`.
    suits: tells a model of this family from others of the name; None: all that suit no other.
    """

    name: str
    config: Callable[[GgufKeys], Config]
    names: Names
    suits: Callable[[GgufKeys], bool] | None = None

    def name_of(self, tensor: str) -> str | RearrangedTensor | None:
        """Return our name of a file's tensor, or None if it is unknown."""
        found = self.names.get(_NUMBER.sub(".#", tensor))
        if found is None or "#" in tensor:
            return None
        numbers = iter(_NUMBER.findall(tensor))
        ours = found if isinstance(found, str) else found.name
        numbered = "".join(next(numbers)[1:] if c == "#" else c for c in ours)
        return numbered if isinstance(found, str) else found._replace(name=numbered)


def layer_of(tensor: str) -> int:
    """Return the layer of a file's tensor, or -1 if it belongs to none."""
    match = re.match(r"blk\.([0-9]{1,6})\.", tensor)
    return -1 if match is None else int(match[1])


def usual_config(
    keys: GgufKeys,
    architecture: str,
    width: str = "moe_intermediate_size",
    can_group: bool = False,
    attends_everywhere: bool = True,
) -> Config:
    """Convert the metadata that decoders with experts share.

    architecture: its name in `config.json`.
    width: the key of an expert's width in `config.json`.
    can_group: tokens may first choose among groups of experts.
    attends_everywhere: all layers have attention.
    """
    if not can_group:
        keys.only("expert_group_count", 0, 1)
    return {
        **_decoder_config(keys, architecture, attends_everywhere),
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        width: _expert_width(keys),
    }


def dense_config(keys: GgufKeys, architecture: str, attends_everywhere: bool = True) -> Config:
    """Convert the metadata of a decoder without experts; others: as for `usual_config`."""
    keys.only("expert_count", 0)
    width = keys.need_even("feed_forward_length")
    config = _decoder_config(keys, architecture, attends_everywhere)
    return {**config, "intermediate_size": width}


def _decoder_config(keys: GgufKeys, architecture: str, attends_everywhere: bool) -> Config:
    keys.only("attention.causal", True)
    vocab_size = keys.shapes.get("token_embd.weight", (0,))[0]
    config: Config = {
        "architectures": [architecture],
        "vocab_size": vocab_size or keys.need("vocab_size"),
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": keys.need_even("attention.head_count", not attends_everywhere),
        "num_key_value_heads": keys.even("attention.head_count_kv", not attends_everywhere),
        "head_dim": keys.get("attention.key_length"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.need("context_length"),
        "rope_theta": keys.get("rope.freq_base") or 10000.0,
        "rope_scaling": _rope_scaling(keys),
        "rotary_dim": keys.get("rope.dimension_count"),
        "tie_word_embeddings": "output.weight" not in keys.shapes,
        # Not in the file; weights are unpacked to the dtype that published models compute in.
        "dtype": "bfloat16",
    }
    return {name: value for name, value in config.items() if value is not None}


def _expert_width(keys: GgufKeys) -> Value:
    """Return the width of an expert, which older files tell only by their tensors."""
    stacked = {n: s for n, s in keys.shapes.items() if len(s) == 3}
    stored = [s[1] for n, s in stacked.items() if "ffn_gate_exps.weight" in n]
    stored += [s[1] // 2 for n, s in stacked.items() if "ffn_gate_up_exps.weight" in n]
    width = keys.even("expert_feed_forward_length", may_lack=True)
    return width or (stored[0] if stored else keys.need("feed_forward_length"))


def shared_width(keys: GgufKeys) -> int:
    """Return the total width of all shared experts from their tensors: the keys disagree."""
    stored = [s[0] for n, s in keys.shapes.items() if n.endswith("ffn_gate_shexp.weight")]
    return stored[0] if stored else 0


def has_qkv_bias(keys: GgufKeys) -> bool:
    """Return True if queries, keys and values have biases, apart or fused."""
    return not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(keys.shapes)


def _turned(kind: str, name: str) -> RearrangedTensor:
    """Return our weight or bias of queries or keys whose rows interleave a head's two halves.

    llama.cpp's converter writes Llama's in this order, which older rotary code has.
    """

    def view(config: ModelConfig) -> ArrayView:
        spec = config.attention
        num_heads = spec.num_heads if name == "q" else spec.num_kv_heads
        width = config.hidden_size if kind == "weight" else 1
        return ArrayView((num_heads, 2, spec.head_dim // 2, width), order=(0, 2, 1, 3))

    return RearrangedTensor(f"model.layers.#.self_attn.{name}_proj.{kind}", view)


TURNED_QK: Names = {
    f"blk.#.attn_{name}.{kind}": _turned(kind, name) for kind in ("weight", "bias") for name in "qk"
}

V_BIAS: Names = {"blk.#.attn_v.bias": "model.layers.#.self_attn.v_proj.bias"}


def _rope_scaling(keys: GgufKeys) -> Config | PairDivisors | None:
    """Convert rotary scaling as llama.cpp reads it: a factor without a type is linear."""
    kind = keys.get("rope.scaling.type")
    # For YaRN this is config.json's attention_factor; other kinds ignore it.
    of_yarn = () if kind == "yarn" else ("yarn_attn_factor",)
    for name in ("attn_factor", *of_yarn):
        keys.only(f"rope.scaling.{name}", 1.0)
    keys.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)  # -1: as usual
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    if kind == "none" or (kind in (None, "linear") and factor in (None, 0, 1)):
        return _divisors(keys)
    if ROPE_DIVISORS in keys.shapes:
        raise UnsupportedError(
            f"a rotary embedding that is stretched ({shown(kind or 'linear')}) and has frequencies "
            f"of its own ({ROPE_DIVISORS}) is not supported."
        )
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    scaling: Config = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": _attention_factor(keys),
    }
    return {name: value for name, value in scaling.items() if value is not None}


def _divisors(keys: GgufKeys) -> PairDivisors | None:
    """Read divisors of frequencies, pair by pair, as in Llama 3.1 and later."""
    if ROPE_DIVISORS not in keys.shapes:
        return None
    return PairDivisors(tuple(keys.vector(ROPE_DIVISORS)))


def _attention_factor(keys: GgufKeys) -> Value | None:
    """Read YaRN's factor of cosines and sines; 1, llama.cpp's default, means the derived one."""
    value = keys.get("rope.scaling.yarn_attn_factor")
    return None if value == 1.0 else value
