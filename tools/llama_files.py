"""Writes tests/llama_files/: tiny random models as llama.cpp itself quantises them.

pip install llama-cpp-python && python tools/llama_files.py

Tests read the files; none of them needs llama.cpp.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path

import llama_cpp

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from gguf.constants import GGMLQuantizationType as Type  # noqa: E402
from gguf_files import write_gguf  # noqa: E402
from gguf_oracle import named_model  # noqa: E402

FILES = {
    "qwen3_moe-0-Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "qwen3_moe-0-IQ4_NL": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "olmoe-1-IQ4_XS": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "mixtral-4-Q5_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "qwen2_moe-1-Q5_K_M-96": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "deepseek_v2-4-Q2_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K,
    "gpt_oss-0-MXFP4_MOE": llama_cpp.LLAMA_FTYPE_MOSTLY_MXFP4_MOE,
}
"""A family, the seed of its `random_model`, what llama.cpp calls the mixture of types, and, where
it is not 256, the width of experts: rows that do not divide into such blocks get other types."""


def main() -> None:
    folder = TESTS / "llama_files"
    folder.mkdir(exist_ok=True)
    for name, mixture in FILES.items():
        family = name.partition("-")[0]
        with tempfile.TemporaryDirectory() as temporary:
            whole = Path(temporary) / "whole.gguf"
            write_gguf(whole, family, named_model(name), lambda *_: Type.F32)
            _quantise(whole, folder / f"{name}.gguf", mixture)


def _quantise(source: Path, target: Path, mixture: int) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = mixture, 1
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    if status:
        raise SystemExit(f"llama.cpp could not write {target}: status {status}.")


if __name__ == "__main__":
    main()
