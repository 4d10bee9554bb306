"""The format that weights were rounded to, according to `config.json`.

Which tensors have it, and the types of their scales, only the checkpoint tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lowtide.config.fields import Fields
from lowtide.errors import UnsupportedError
from lowtide.files.json_file import listed, shown
from lowtide.formats.grouped_ints import GROUPS

PACKED_METHOD = "lowtide"
"""The `quant_method` of folders written by `lowtide pack`."""

READ = (
    "Read are safetensors in bfloat16, float16 and float32; FP8 by blocks of 128 by 128; GPTQ and "
    "AWQ (gemm) in 4 bits, and compressed-tensors' pack-quantized in 4 and 8, in groups of 32, 64 "
    "and 128 or with a scale for each row; gpt-oss' MXFP4 experts; and GGUF"
)

OF_ROWS = -1
"""Group size that means one scale per row."""

_NAMES = {
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 by rows (FBGEMM)",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gguf": "GGUF",
    "mxfp4": "MXFP4",
    "modelopt": "NVFP4 or FP8 of ModelOpt",
    "auto-round": "AutoRound",
    "mlx": "MLX",
}
"""Common names of a `quant_method`."""


class Quantisation(NamedTuple):
    """A format of rounded weights."""

    method: str  # gptq, awq, compressed-tensors, fp8
    num_bits: int
    group: int  # weights along the input that share a scale; `OF_ROWS`
    is_symmetric: bool = False  # it has no zeros
    version: int = 2  # of GPTQ's convention: in the first, zeros are stored less one


MODELOPT_NAME = "hf_quant_config.json"
"""The file beside `config.json` in which ModelOpt names the format of weights."""


def with_modelopt(config: Mapping[str, object], said: Mapping[str, object]) -> Mapping[str, object]:
    """Add ModelOpt's format to a `config.json` that names none."""
    inner = said.get("quantization", said)
    algorithm = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    if algorithm is None or config.get("quantization_config") is not None:
        return config
    rounded = {"quant_method": "modelopt", "quant_algo": algorithm}
    return {**config, "quantization_config": rounded}


def read_quantisation(fields: Fields) -> Quantisation | None:
    """Read the format of weights; None if they are not rounded, or were by `lowtide pack`.

    Raises UnsupportedError naming a format that is not supported.
    """
    said = fields.raw("quantization_config")
    if said is None:
        return None
    method = said.get("quant_method") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(method, str):
        raise _refusal("unknown")
    if method == PACKED_METHOD and said.get("version") == 1:
        return None
    reader = _READERS.get(method)
    if method == "modelopt" and isinstance(said.get("quant_algo"), str):
        raise _refusal(f"{shown(said['quant_algo'])[1:-1]} of ModelOpt")
    if reader is None:
        raise _refusal(_NAMES.get(method, shown(method)))
    return reader(said)


def _gptq(said: Mapping[str, object]) -> Quantisation:
    group = _group(said.get("group_size"), "GPTQ")
    if said.get("desc_act") and group != OF_ROWS:  # one group has one order
        raise _refusal("GPTQ with act-order (desc_act)")
    convention = said.get("checkpoint_format") or said.get("format") or "gptq"
    if convention not in ("gptq", "gptq_v2") or said.get("is_marlin_format"):
        kind = "marlin" if said.get("is_marlin_format") else convention
        raise _refusal(f"GPTQ packed as {shown(kind)}")
    bits = _bits(said.get("bits"), "GPTQ", (4,))
    return Quantisation("gptq", bits, group, version=2 if convention == "gptq_v2" else 1)


def _awq(said: Mapping[str, object]) -> Quantisation:
    # AutoAWQ's key, then those of the tools after it.
    version = said.get("version") or said.get("format") or said.get("checkpoint_format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refusal(f"AWQ in version {shown(version)}")
    if said.get("zero_point") is False:
        raise _refusal("AWQ without zeros (zero_point)")
    bits = _bits(said.get("bits", said.get("w_bit")), "AWQ", (4,))
    return Quantisation(
        "awq", bits, _group(said.get("group_size", said.get("q_group_size")), "AWQ")
    )


def _compressed_tensors(said: Mapping[str, object]) -> Quantisation:
    name = "compressed-tensors"
    if _has_schemes(said.get("transform_config")):
        raise _refusal(f"{name} of a model that was rotated before (transform_config)")
    groups = said.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    formats = [
        said.get("format"),
        *(each.get("format") for each in schemes if isinstance(each, dict)),
    ]
    told = {shown(each) for each in formats if each is not None}
    if told != {shown("pack-quantized")}:
        raise _refusal(f"{name} in {listed(sorted(told)) or 'no format'}")
    found = {_scheme(each, name) for each in schemes}
    if len(found) != 1:
        raise _refusal(f"{name} with {len(found)} kinds of weights")
    return found.pop()


def _has_schemes(transforms: object) -> bool:
    """Return True if inputs must be multiplied with the transforms of weights, too."""
    return bool(transforms.get("config_groups") if isinstance(transforms, dict) else transforms)


def _scheme(scheme: object, name: str) -> Quantisation:
    weights = scheme.get("weights") if isinstance(scheme, dict) else None
    if not isinstance(scheme, dict) or not isinstance(weights, dict):
        raise _refusal(f"{name} without a scheme of weights")
    if scheme.get("input_activations") or scheme.get("output_activations"):
        raise _refusal(f"{name} with rounded activations")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _refusal(f"{name} with act-order ({shown(weights['actorder'])})")
    strategy, kind = weights.get("strategy", "group"), weights.get("type", "int")
    if strategy not in ("group", "channel") or kind != "int" or weights.get("dynamic"):
        raise _refusal(f"{name} with {shown(kind)} weights, scales by {shown(strategy)}")
    bits = _bits(weights.get("num_bits"), name, (4, 8))
    group = OF_ROWS if strategy == "channel" else _group(weights.get("group_size"), name)
    is_symmetric = weights.get("symmetric", True) is True
    return Quantisation("compressed-tensors", bits, group, is_symmetric)


def _fp8(said: Mapping[str, object]) -> Quantisation:
    if said.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(f"FP8 of kind {shown(said['fmt'])}")
    blocks = said.get("weight_block_size")
    if blocks != [128, 128]:
        told = "with one scale for a tensor"
        if isinstance(blocks, list | tuple) and blocks:
            is_pair = len(blocks) == 2
            told = f"by blocks of {' by '.join(map(shown, blocks)) if is_pair else shown(blocks)}"
        raise _refusal(f"FP8 {told}")
    return Quantisation("fp8", 8, 128)


_READERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8}


def _bits(value: object, name: str, known: tuple[int, ...]) -> int:
    if type(value) is not int or value not in known:
        raise _refusal(f"{name} in {shown(value)} bits")
    return value


def _group(value: object, name: str) -> int:
    if type(value) is not int or value not in (*GROUPS, OF_ROWS):
        raise _refusal(f"{name} in groups of {shown(value)}")
    return value


def _refusal(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"config.json has a quantization_config: the weights' format is {name}, which is not read. "
        f"{READ}; choose a repository with one of these, or the unquantised one."
    )
