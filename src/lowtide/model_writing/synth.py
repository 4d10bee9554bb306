"""Makes checkpoints with random weights: `synth`.

The folder is in a family's exact Hugging Face format (names, shapes, element types, shards,
index, tokenizer), so that everything can be tried and measured without a download. The words
such a model writes mean nothing; its routing and its confidence are made to look like a trained
model's (see `Character`). Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from lowtide.errors import StorageError, UsageError
from lowtide.families import SynthSize, families
from lowtide.files.whole_file import whole_file
from lowtide.model_folder.checkpoint import INDEX_NAME
from lowtide.model_writing.safetensors_writer import SafetensorsWriter, check_disk_space
from lowtide.model_writing.synth_tokenizer import tokenizer_config_json, tokenizer_json
from lowtide.model_writing.synth_weights import Source, SynthTensor, tensors_of
from lowtide.progress import Progress, no_progress

_TOKENIZER, _TOKENIZER_CONFIG, _CONFIG = "tokenizer.json", "tokenizer_config.json", "config.json"
_TEXTS = (_TOKENIZER, _TOKENIZER_CONFIG, INDEX_NAME, _CONFIG)


def synth(
    family: str,
    size: str,
    out: Path,
    *,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Path:
    """Write a checkpoint of a family with random weights into the folder `out`; return it.

    family: a name, also with dashes for underscores. size: a key of its `sizes`. Raises UsageError
    for an unknown family or size, and the errors of `write_checkpoint`.
    """
    family = family.replace("-", "_")
    if family not in families():
        raise UsageError(f"There is no family {family!r} to make; choose {', '.join(families())}.")
    sizes = families()[family].sizes()
    if size not in sizes:
        raise UsageError(f"{family} has no size {size!r}; choose {', '.join(sizes)}.")
    return write_checkpoint(sizes[size], out, seed=seed, progress=progress)


def write_checkpoint(
    size: SynthSize,
    out: Path,
    *,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Path:
    """Write a checkpoint with random weights into the folder `out`; return it.

    Equal arguments give equal bytes. `config.json` is written last, and on any failure, Ctrl-C
    included, every file and folder made here is removed: a folder with `config.json` is complete.

    seed: 0 or more. Raises UsageError for a folder with any contents, StorageError for a disk that
    is too small or fails.
    """
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed must be from 0 to {2**63 - 1}, not {seed}.")
    folders = [folder for folder in (out, *out.parents) if not os.path.exists(folder)]
    files: list[Path] = []  # to be taken away again on a failure
    try:
        _prepare_folder(out)
        _write_files(out, files, size, seed, progress)
    except BaseException:
        _remove(files, folders)
        raise
    return out


def plan_shards(tensors: list[SynthTensor], max_shard_bytes: int) -> list[list[SynthTensor]]:
    """Divide tensors as published files do: filled in layer order, sorted by name within a file.

    So an expert's matrices lie in the order down, gate, up, except where a file ends between them.
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


def _write_files(
    out: Path, files: list[Path], size: SynthSize, seed: int, progress: Progress
) -> None:
    """Write the files, adding each to `files`."""
    tensors = list(tensors_of(size))
    shards = plan_shards(tensors, size.max_shard_bytes)
    names = [_shard_name(i, len(shards)) for i in range(len(shards))]
    total_bytes = sum(t.output.num_bytes for t in tensors)
    texts = _texts(size, shards, names, total_bytes)
    check_disk_space(out, total_bytes + sum(len(t) for t in texts.values()))
    source = Source(seed, sum(math.prod(t.shape) for t in tensors))
    files += [out / name for name in (*names, *texts)]

    done_bytes = 0
    for name, shard in zip(names, shards, strict=True):
        outputs = [t.output for t in shard]
        with SafetensorsWriter(out / name, outputs, metadata={"format": "pt"}) as writer:
            for tensor in shard:
                for bits in tensor.fill(source, tensor.shape):
                    writer.write(bits.data)
                done_bytes += tensor.output.num_bytes
                progress("writing", done_bytes, total_bytes)
    for name, text in texts.items():
        with whole_file(out / name, "file") as file:
            file.write(text.encode())


def _remove(files: Sequence[Path], folders: Sequence[Path]) -> None:
    """Remove files, then folders, innermost first."""
    for file in files:
        file.unlink(missing_ok=True)
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # never made, or another process put a file there meanwhile
            return


def _texts(
    size: SynthSize, shards: list[list[SynthTensor]], names: list[str], total_bytes: int
) -> dict[str, str]:
    """Return the folder's text files in writing order; the last, `config.json`, marks the end."""
    weight_map = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    texts = {
        _TOKENIZER: tokenizer_json(size.eos_token_id),
        _TOKENIZER_CONFIG: tokenizer_config_json(),
        INDEX_NAME: json.dumps(index, indent=2, sort_keys=True),
        _CONFIG: json.dumps(size.config, indent=2, sort_keys=True),
    }
    if len(shards) == 1:  # one file is `model.safetensors`, and nothing needs an index
        del texts[INDEX_NAME]
    return texts


def _shard_name(index: int, num_shards: int) -> str:
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{index + 1:05}-of-{num_shards:05}.safetensors"


def _prepare_folder(out: Path) -> None:
    """Create the folder, or check that it has at most an earlier run's partial files."""
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
            f"{out} is not empty (it holds {other.name}); "
            "choose a new folder, or empty this one first."
        )
    for path in leavings:
        path.unlink(missing_ok=True)


def _is_leaving(path: Path) -> bool:
    """Return True for a partial file of an earlier run that was killed."""
    name = path.name
    is_shard = name.startswith("model") and name.endswith(".safetensors.partial")
    is_text = any(name.startswith(f".{text}.") for text in _TEXTS)  # as `whole_file` calls them
    return (is_shard or is_text) and path.is_file() and not path.is_symlink()
