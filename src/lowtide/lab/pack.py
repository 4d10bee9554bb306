"""Packing: a model's folder with weights in q8 or q4, which is a model itself and reads faster.

A shard of the source becomes one of the new folder, tensor by tensor, through memory for a few
pieces at a time. What was written whole stays when a run is interrupted; `config.json` comes last,
so that nothing is loaded before all of it is there and the source was found unchanged.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lowtide.config.quantisation import PACKED_METHOD
from lowtide.engine.opening import EngineConfig, OpenModel, open_model
from lowtide.engine.weight_formats import QUANTISED
from lowtide.errors import CheckpointError, StorageError, UnsupportedError, UsageError
from lowtide.files.whole_file import whole_file
from lowtide.formats import MatrixFormat, format_of, formats
from lowtide.formats.convert import Pack, convert
from lowtide.kernels.choice import choose_pack
from lowtide.lab.safetensors_writer import OutputTensor, SafetensorsWriter
from lowtide.model_folder.checkpoint import INDEX_NAME, Checkpoint, TensorEntry
from lowtide.model_folder.hub import tokenizer_file
from lowtide.plan import OWN_FORMAT
from lowtide.reading.dense_weights import Progress, no_progress
from lowtide.reading.finite_weights import read_part
from lowtide.schemas import model_schema
from lowtide.schemas.packed import BYTES_DTYPE, packed_name, packed_shape
from lowtide.schemas.weights import expert_tensors

PIECE_BYTES = 8 << 20
"""Of the source, that a thread rounds at a time."""

_NOTES = "packing.json"
_COPIED = (".json", ".txt", ".model", ".jinja")


def pack(
    model: str | Path,
    out: Path,
    format: str | None = None,
    expert_dtype: str | None = None,
    dense_dtype: str | None = None,
    progress: Progress = no_progress,
    kernels: str = "auto",
) -> Path:
    """Writes `model` into the folder `out` with weights in these formats; see `EngineConfig`.

    Goes on where an earlier run was interrupted. Raises UsageError for a folder with other things
    in it or that another process writes, StorageError for a disk that is full or a source that
    changed meanwhile, and what opening a model raises.
    """
    options = EngineConfig(
        format=format, expert_dtype=expert_dtype, dense_dtype=dense_dtype, device="cpu"
    )
    opened = open_model(model, options)
    checkpoint = _packable(opened)
    chosen = _chosen(opened, checkpoint)
    notes = {
        "source": [[file.path.name, *_facts(file.path)] for file in checkpoint.files],
        "formats": {name: each.name for name, each in chosen.items()},
    }
    with _reserved(out, notes):
        packer = _Packer(checkpoint, chosen, out, choose_pack(kernels), progress)
        packer.run()
        if notes["source"] != [[f.path.name, *_facts(f.path)] for f in checkpoint.files]:
            raise StorageError(
                f"{opened.folder} changed while it was packed; remove {out} and begin again."
            )
        _write_texts(opened, out, packer.weight_map())
    return out


def _packable(opened: OpenModel) -> Checkpoint:
    if opened.checkpoint is None:
        raise CheckpointError(f"{opened.folder} has no weights to pack.")
    if not opened.folder.is_dir() or not (opened.folder / "config.json").is_file():
        raise UnsupportedError(
            f"{opened.folder} is no folder of safetensors; only those are packed."
        )
    if not opened.is_rounded_as_read:
        raise UsageError(
            f"There is nothing to pack: choose --format {' or '.join(QUANTISED)} for a model whose "
            "weights are not stored so."
        )
    if "quantization_config" in _config_of(opened.folder):
        raise UnsupportedError(
            f"{opened.folder} is quantised already (quantization_config); pack the model it was "
            "made of."
        )
    return opened.checkpoint


def _chosen(opened: OpenModel, checkpoint: Checkpoint) -> dict[str, MatrixFormat]:
    """The format of each tensor that is packed, by its name in the checkpoint."""
    dense = opened.weight_map.dense
    places = {(e.file, e.offset): name for name, e in checkpoint.tensors.items() if e.num_bytes}
    chosen = {
        places[dense[name].file, dense[name].offset]: each
        for name, each in opened.dense_formats.items()
    }
    asked = opened.options.formats.experts
    if opened.config.experts is not None and asked != OWN_FORMAT and asked in QUANTISED:
        for spec in expert_tensors(model_schema(opened.config), checkpoint):
            chosen[spec.name] = formats()[asked].for_rows(spec.shape[-1])
    return chosen


class _Packer:
    """Writes the shards of one folder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: Mapping[str, MatrixFormat],
        out: Path,
        pack: Pack,
        progress: Progress,
    ) -> None:
        self._checkpoint, self._chosen, self._out = checkpoint, chosen, out
        self._pack, self._progress = pack, progress
        self._total_bytes = sum(entry.num_bytes for entry in checkpoint.tensors.values())
        self._done_bytes = 0

    def run(self) -> None:
        num_threads = min(8, os.cpu_count() or 1)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="lowtide-pack") as pool:
            for file in range(len(self._checkpoint.files)):
                self._write_shard(file, pool, 2 * num_threads)

    def weight_map(self) -> dict[str, str]:
        """The shard of every tensor of the new folder."""
        files = self._checkpoint.files
        return {
            self._output(name, entry).name: files[entry.file].path.name
            for name, entry in self._checkpoint.tensors.items()
        }

    def _write_shard(self, file: int, pool: ThreadPoolExecutor, num_ahead: int) -> None:
        source = self._checkpoint.files[file]
        tensors = [(n, e) for n, e in self._checkpoint.tensors.items() if e.file == file]
        tensors.sort(key=lambda named: named[1].offset)
        outputs = [self._output(name, entry) for name, entry in tensors]
        writer = SafetensorsWriter(self._out / source.path.name, outputs, metadata={"format": "pt"})
        if writer.path.exists() and writer.path.stat().st_size == writer.num_bytes:
            self._tell(sum(entry.num_bytes for _, entry in tensors))  # of an earlier run
            return
        descriptor = source.open()
        waiting: deque[tuple[Future[memoryview], int]] = deque()
        try:
            with writer:
                for work, num_bytes in self._pieces(tensors, descriptor):
                    waiting.append((pool.submit(work), num_bytes))
                    if len(waiting) > num_ahead:
                        self._write_next(writer, waiting)
                while waiting:
                    self._write_next(writer, waiting)
        finally:
            for future, _ in waiting:
                future.cancel()
            pool.submit(int).result()  # what reads from the file has begun before this
            os.close(descriptor)

    def _write_next(
        self, writer: SafetensorsWriter, waiting: deque[tuple[Future[memoryview], int]]
    ) -> None:
        future, num_bytes = waiting.popleft()
        writer.write(future.result())
        self._tell(num_bytes)

    def _tell(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress("packing", self._done_bytes, self._total_bytes)

    def _pieces(
        self, tensors: list[tuple[str, TensorEntry]], descriptor: int
    ) -> Iterator[tuple[Callable[[], memoryview], int]]:
        for name, entry in tensors:
            row_bytes = entry.num_bytes // max(1, math.prod(entry.shape[:-1]))
            step = max(1, PIECE_BYTES // max(1, row_bytes)) * row_bytes
            for start in range(0, entry.num_bytes, max(1, step)):
                num_bytes = min(step, entry.num_bytes - start)

                def work(
                    name: str = name, entry: TensorEntry = entry, start: int = start, n: int = step
                ) -> memoryview:
                    content = read_part(self._checkpoint, name, entry, descriptor, start, n)
                    return self._made(name, entry, content)

                yield work, num_bytes

    def _made(self, name: str, entry: TensorEntry, content: NDArray[np.uint8]) -> memoryview:
        if name not in self._chosen:
            return content.data
        source, to = format_of(entry.dtype), self._chosen[name]
        num_weights = len(content) // source.block_bytes[0] * source.block_size
        target = np.empty(to.num_bytes(num_weights), np.uint8)
        convert([content], source, target, to, self._pack)
        return target.data

    def _output(self, name: str, entry: TensorEntry) -> OutputTensor:
        if name not in self._chosen:
            return OutputTensor(name, entry.dtype, entry.shape)
        to = self._chosen[name].name
        return OutputTensor(packed_name(name, to), BYTES_DTYPE, packed_shape(entry.shape, to))


@contextmanager
def _reserved(out: Path, notes: Mapping[str, object]) -> Iterator[None]:
    """Makes the folder this process's own until all of it is written, and says of what it is.

    Raises UsageError where it holds something else, or belongs to another process.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out / _NOTES, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror or error}.") from error
    with os.fdopen(descriptor, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"Another process packs into {out}; wait for it.") from error
        found = file.read()
        text = json.dumps(notes, sort_keys=True)
        others = [path.name for path in out.iterdir() if path.name != _NOTES]
        if found != text and others:
            if not found:
                (out / _NOTES).unlink()
            raise UsageError(
                f"{out} holds {others[0]}, which is not of this packing; choose a new folder."
            )
        file.seek(0)
        file.truncate()
        file.write(text)
        file.flush()
        yield
        (out / _NOTES).unlink()


def _write_texts(opened: OpenModel, out: Path, weight_map: Mapping[str, str]) -> None:
    """All that is not weights, `config.json` last."""
    shared = tokenizer_file(opened.folder)  # a demo's lies elsewhere
    for path in sorted({*opened.folder.iterdir(), shared}):
        is_own = path.name in ("config.json", INDEX_NAME)
        if path.suffix in _COPIED and path.is_file() and not is_own:
            with whole_file(out / path.name, "file") as file:
                file.write(path.read_bytes())
    shards = sorted(set(weight_map.values()))
    if len(shards) > 1 or shards != ["model.safetensors"]:
        total_bytes = sum((out / shard).stat().st_size for shard in shards)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(out / INDEX_NAME, index)
    own = opened.formats
    of_parts = {"experts": own.experts, "dense": own.dense, "head": own.head}
    packed = {"quant_method": PACKED_METHOD, "version": 1, "formats": of_parts}
    _write_json(out / "config.json", {**_config_of(opened.folder), "quantization_config": packed})


def _write_json(path: Path, value: object) -> None:
    with whole_file(path, "file") as file:
        file.write(json.dumps(value, indent=2).encode())


def _config_of(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_bytes())
    return config


def _facts(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns
