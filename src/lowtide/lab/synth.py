"""Makes checkpoints with random weights: `synth`.

The folder is in a family's exact Hugging Face format (names, shapes, element types, shards,
index, tokenizer), so that everything can be tried and measured without a download. The words
such a model writes mean nothing; its routing and its confidence are made to look like a trained
model's (see `Character`). Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import StorageError, UsageError
from lowtide.families import SynthSize, families
from lowtide.lab.safetensors_writer import (
    OpenFile,
    SafetensorsWriter,
    check_disk_space,
    open_for_writing,
    partial_path,
    write_text_file,
)
from lowtide.lab.synth_tokenizer import tokenizer_config_json, tokenizer_json
from lowtide.lab.synth_weights import Source, SynthTensor, tensors_of

Progress = Callable[[int, int], None]
"""Called with the bytes of weights written so far and of all of them."""


def synth(
    family: str,
    size: str,
    out: Path,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    open_file: OpenFile = open_for_writing,
) -> Path:
    """Writes a checkpoint of a family with random weights into the folder `out`; returns that.

    size: a key of the family's `sizes`. Raises UsageError for an unknown family or size, and all
    else as `write_checkpoint` does.
    """
    if family not in families():
        raise UsageError(f"There is no family {family!r} to make; choose {', '.join(families())}.")
    sizes = families()[family].sizes()
    if size not in sizes:
        raise UsageError(f"{family} has no size {size!r}; choose {', '.join(sizes)}.")
    return write_checkpoint(sizes[size], out, seed=seed, progress=progress, open_file=open_file)


def write_checkpoint(
    size: SynthSize,
    out: Path,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    open_file: OpenFile = open_for_writing,
) -> Path:
    """Writes a checkpoint with random weights into the folder `out`, which it returns.

    Equal arguments give equal bytes. `config.json` is written last, and on any failure, Ctrl-C
    too, every file and folder made here is removed: a folder with `config.json` is whole.

    seed: 0 or more. open_file: how files are made. Raises UsageError for a folder that holds
    anything already, StorageError for a disk that is too small or fails.
    """
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed must be from 0 to {2**63 - 1}, not {seed}.")
    made = _Made(out, set())
    try:
        _prepare_folder(out, made)
        _write_files(made, size, seed, progress or _no_progress, open_file)
    except BaseException:
        made.remove()
        raise
    return out


def plan_shards(tensors: list[SynthTensor], max_shard_bytes: int) -> list[list[SynthTensor]]:
    """Tensors as published files have them: filled in layer order, sorted by name within a file.

    So an expert's matrices lie in the order down, gate, up, except where a file ended between.
    """
    shards: list[list[SynthTensor]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        num_bytes = tensor.output.num_bytes
        if shards[-1] and size_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(tensor)
        size_bytes += num_bytes
    return [sorted(shard) for shard in shards]


@dataclass
class _Made:
    """What this run made, to be taken away again if it fails."""

    out: Path
    files: set[Path]
    folders: tuple[Path, ...] = ()  # innermost first

    def remove(self) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)
            partial_path(file).unlink(missing_ok=True)
        for folder in self.folders:
            try:
                folder.rmdir()
            except OSError:  # never made, or another process put a file there meanwhile
                return


def _write_files(
    made: _Made, size: SynthSize, seed: int, progress: Progress, open_file: OpenFile
) -> None:
    out = made.out
    tensors = list(tensors_of(size))
    shards = plan_shards(tensors, size.max_shard_bytes)
    names = [_shard_name(i, len(shards)) for i in range(len(shards))]
    total_bytes = sum(t.output.num_bytes for t in tensors)
    texts = _texts(size, shards, names, total_bytes)
    check_disk_space(out, total_bytes + sum(len(t) for t in texts.values()))
    source = Source(seed, sum(math.prod(t.shape) for t in tensors))
    made.files |= {out / name for name in (*names, *texts)}

    done_bytes = 0
    for name, shard in zip(names, shards, strict=True):
        outputs = [t.output for t in shard]
        with SafetensorsWriter(
            out / name, outputs, metadata={"format": "pt"}, open_file=open_file
        ) as writer:
            for tensor in shard:
                for bits in source.elements(tensor):
                    writer.write(bits.data)
                done_bytes += tensor.output.num_bytes
                progress(done_bytes, total_bytes)
    for name, text in texts.items():
        write_text_file(out / name, text, open_file=open_file)


def _texts(
    size: SynthSize, shards: list[list[SynthTensor]], names: list[str], total_bytes: int
) -> dict[str, str]:
    """The folder's text files in the order they are written: `config.json` says it is whole."""
    weight_map = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    texts = {
        "tokenizer.json": tokenizer_json(size.eos_token_id),
        "tokenizer_config.json": tokenizer_config_json(),
        "model.safetensors.index.json": json.dumps(index, indent=2, sort_keys=True),
        "config.json": json.dumps(size.config, indent=2, sort_keys=True),
    }
    if len(shards) == 1:  # one file is `model.safetensors`, and nothing needs an index
        del texts["model.safetensors.index.json"]
    return texts


def _shard_name(index: int, num_shards: int) -> str:
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{index + 1:05}-of-{num_shards:05}.safetensors"


def _prepare_folder(out: Path, made: _Made) -> None:
    """Makes the folder, or checks that an existing one holds at most an earlier run's leavings."""
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    made.folders = tuple(missing)
    try:
        out.mkdir(parents=True, exist_ok=True)
        present = sorted(out.iterdir())
    except OSError as error:
        raise StorageError(
            f"The folder {out} cannot be made: {error.strerror or error}; choose another."
        ) from error
    leavings = [path for path in present if _is_leaving(path)]
    if len(leavings) < len(present):
        other = next(path for path in present if path not in leavings)
        raise UsageError(
            f"{out} is not empty (it holds {len(present)} files, {other.name} among them); "
            "choose a new folder, or empty this one first."
        )
    for path in leavings:
        path.unlink(missing_ok=True)


def _is_leaving(path: Path) -> bool:
    """Whether this is a file that an earlier run was killed over while writing it."""
    name = path.name.removesuffix(".partial")
    is_ours = name.startswith("model") or name in ("config.json", *_TOKENIZER_FILES)
    return name != path.name and is_ours and path.is_file() and not path.is_symlink()


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    pass
