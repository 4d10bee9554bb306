"""Packs a model: writes its folder with weights in q8 or q4, a complete model that reads faster.

A shard of the source becomes a shard of the new folder, tensor by tensor, with a few pieces in
memory at a time. Complete shards stay if a run is interrupted. `config.json` comes last, so that
nothing is loaded before everything is written and the source was found unchanged.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowtide.config.quantisation import PACKED_METHOD
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.facts import ModelFacts
from lowtide.engine.opening.model import open_model
from lowtide.engine.opening.weight_formats import QUANTISED, check_packed
from lowtide.errors import CheckpointError, StorageError, UnsupportedError, UsageError
from lowtide.files.whole_file import whole_file
from lowtide.formats import MatrixFormat, format_of, formats
from lowtide.formats.convert import Importance, Pack
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.formats.matrix import Bytes
from lowtide.kernels.choice import choose_pack
from lowtide.model_folder.chat_template import TOOL_TEMPLATE_NAME
from lowtide.model_folder.checkpoint import INDEX_NAME, Checkpoint, TensorEntry
from lowtide.model_writing.pack_folder import config_of, reserved
from lowtide.model_writing.safetensors_writer import OutputTensor, SafetensorsWriter
from lowtide.plan import OWN_FORMAT, WeightFormats
from lowtide.progress import Progress, no_progress
from lowtide.reading.by_expert import BORDER_BYTES
from lowtide.reading.file_reader import AnyRead, ArrayRead, FileReader, Piece, Read, Ticket
from lowtide.schemas import model_schema
from lowtide.schemas.packed import BYTES_DTYPE, packed_name, packed_shape
from lowtide.schemas.schema import DOWN
from lowtide.schemas.weights import ExpertTensor, expert_tensors

PIECE_BYTES = 8 << 20
"""Bytes of the source that a thread reads and rounds at a time."""

NUM_WAITING = 2
"""Threads beyond the cores, which wait for the disk while others round."""

AS_IS = formats()["BF16"]
"""Format of bytes that are copied unchanged, whatever their meaning."""

_COPIED = (".json", ".txt", ".model", ".jinja")


def pack(
    model: str | Path,
    out: Path,
    format: str | None = None,
    expert_dtype: str | None = None,
    dense_dtype: str | None = None,
    progress: Progress = no_progress,
    kernels: str = "auto",
    calibration: str | Path | None = None,
) -> Path:
    """Write `model` into the folder `out` with weights in these formats; see `EngineConfig`.

    calibration: a file with experts' inputs, for which rounding errors are minimised. Resumes an
    interrupted run. Raises UsageError for a folder with other contents or in use by another
    process, StorageError for a disk that is full (or too small, before anything is written) or a
    source that changed, and the errors of opening a model.
    """
    check_packed(format, expert_dtype, dense_dtype)
    options = EngineConfig(
        format=format,
        expert_dtype=expert_dtype,
        dense_dtype=dense_dtype,
        device="cpu",
        calibration=None if calibration is None else str(calibration),
    )
    opened = open_model(model, options)
    facts, memory, _ = opened
    checkpoint = _packable(facts.checkpoint, facts.folder, memory.is_rounded_as_read)
    inputs = None if memory.experts is None else memory.experts.inputs
    if calibration is not None and inputs is None:
        raise UsageError(
            f"{calibration} has nothing for these formats: no experts are rounded, or it has no "
            "inputs of theirs (lowtide calibrate --inputs). Leave `calibration` out."
        )
    chosen = _chosen(facts, checkpoint, memory.dense_formats, options.formats.experts)
    notes = _notes(checkpoint, chosen, inputs)
    packer = _Packer(checkpoint, chosen, out, choose_pack(kernels), progress, inputs)
    texts = _copied(facts.folder)
    texts_bytes = sum(path.stat().st_size for path in texts)
    with reserved(out, notes, packer.missing_bytes + texts_bytes):
        try:
            packer.run()
        except StorageError:
            _check_unchanged(notes, checkpoint, facts.folder, out)
            raise
        _check_unchanged(notes, checkpoint, facts.folder, out)
        _copy_texts(texts, facts.folder, out)
        _write_index(out, packer.weight_map())
        packed = _packed_as(memory.formats, inputs)
        own = {**config_of(facts.folder), "quantization_config": packed}
        _write_json(out / "config.json", own)  # last: the folder is a model now
    return out


def _check_unchanged(
    notes: Mapping[str, object], checkpoint: Checkpoint, folder: Path, out: Path
) -> None:
    if notes["source"] != _source(checkpoint):
        raise StorageError(f"{folder} changed while it was packed; remove {out} and begin again.")


def _packable(checkpoint: Checkpoint | None, folder: Path, is_rounded: bool) -> Checkpoint:
    if checkpoint is None:
        raise CheckpointError(f"{folder} has no weights to pack; fetch them into it first.")
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise UnsupportedError(
            f"{folder} is not a folder of safetensors; only those are packed. Pack the folder "
            "that it was made of, or have `format` round it each time it is read."
        )
    if not is_rounded:
        raise UsageError(
            f"There is nothing to pack: the weights of {folder} are stored so already."
        )
    if "quantization_config" in config_of(folder):
        raise UnsupportedError(
            f"{folder} is quantised already (quantization_config); pack the model it was made of."
        )
    return checkpoint


class _Target(NamedTuple):
    """New form of a tensor."""

    format: MatrixFormat
    of_experts: ExpertTensor | None = None


def _chosen(
    facts: ModelFacts,
    checkpoint: Checkpoint,
    dense_formats: Mapping[str, MatrixFormat],
    asked: str,
) -> dict[str, _Target]:
    """Return the target of each tensor to pack, by its name in the checkpoint.

    asked: the format of experts.
    """
    dense = facts.weight_map.dense
    places = {(e.file, e.offset): name for name, e in checkpoint.tensors.items() if e.num_bytes}
    chosen = {
        places[dense[name].file, dense[name].offset]: _Target(each)
        for name, each in dense_formats.items()
    }
    if facts.config.experts is not None and asked != OWN_FORMAT and asked in QUANTISED:
        for tensor in expert_tensors(model_schema(facts.config), checkpoint):
            to = formats()[asked].for_rows(tensor.spec.shape[-1])
            chosen[tensor.spec.name] = _Target(to, tensor)
    return chosen


def _notes(
    checkpoint: Checkpoint, chosen: Mapping[str, _Target], inputs: ExpertInputs | None
) -> dict[str, object]:
    """Return the identity of a packing; one with other notes does not resume it."""
    return {
        "source": _source(checkpoint),
        "formats": {name: each.format.name for name, each in chosen.items()},
        "inputs": None if inputs is None else inputs.digest,
    }


def _source(checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file. Raises StorageError for one that is gone."""
    try:
        found = [(file.path.name, file.path.stat()) for file in checkpoint.files]
    except OSError as error:
        told = f"{error.filename} cannot be read: {error.strerror}"
        raise StorageError(f"{told}; let the model's files lie while they are packed.") from error
    return [(name, facts.st_size, facts.st_mtime_ns) for name, facts in found]


class _Shard(NamedTuple):
    """A file of the new folder, and its parts of the source in order."""

    tensors: list[tuple[str, TensorEntry]]
    writer: SafetensorsWriter


class _Packer:
    """Writes the shards of one folder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: Mapping[str, _Target],
        out: Path,
        pack: Pack,
        progress: Progress,
        inputs: ExpertInputs | None,
    ) -> None:
        self._checkpoint, self._chosen, self._out = checkpoint, chosen, out
        self._pack, self._progress, self._inputs = pack, progress, inputs
        self._total_bytes = sum(entry.num_bytes for entry in checkpoint.tensors.values())
        self._done_bytes = 0
        self._shards = [self._shard(file) for file in range(len(checkpoint.files))]

    @property
    def missing_bytes(self) -> int:
        """The disk space for shards that no earlier run has written."""
        return sum(shard.writer.missing_bytes for shard in self._shards)

    def run(self) -> None:
        num_readers = min(8, os.cpu_count() or 1) + NUM_WAITING
        reader = FileReader(self._checkpoint.files, PIECE_BYTES, self._pack, num_readers)
        with closing(reader):
            for shard in self._shards:
                self._write_shard(shard, reader, 2 * num_readers)

    def weight_map(self) -> dict[str, str]:
        """Return the shard of every tensor of the new folder."""
        files = self._checkpoint.files
        return {
            self._output(name, entry).name: files[entry.file].path.name
            for name, entry in self._checkpoint.tensors.items()
        }

    def _shard(self, file: int) -> _Shard:
        name = self._checkpoint.files[file].path.name
        tensors = [(n, e) for n, e in self._checkpoint.tensors.items() if e.file == file]
        tensors.sort(key=lambda named: named[1].offset)
        # Those of whole sectors first, so that they lie on sectors: then experts are read straight
        # into their slots, without a copy.
        tensors.sort(key=lambda named: self._output(*named).num_bytes % BORDER_BYTES > 0)
        outputs = [self._output(name, entry) for name, entry in tensors]
        path, metadata = self._out / name, {"format": "pt"}
        writer = SafetensorsWriter(path, outputs, metadata=metadata, alignment=BORDER_BYTES)
        return _Shard(tensors, writer)

    def _write_shard(self, shard: _Shard, reader: FileReader, num_ahead: int) -> None:
        tensors, writer = shard
        if writer.is_whole:
            self._add_done(sum(entry.num_bytes for _, entry in tensors))  # of an earlier run
            return
        with writer:
            for target, num_bytes in in_order(reader, self._pieces(tensors), num_ahead):
                writer.write(target.data)
                self._add_done(num_bytes)

    def _add_done(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._progress("packing", self._done_bytes, self._total_bytes)

    def _pieces(
        self, tensors: list[tuple[str, TensorEntry]]
    ) -> Iterator[tuple[list[AnyRead], Bytes]]:
        """Yield reads in the order of the shard, with the memory they fill."""
        for name, entry in tensors:
            for start, num_bytes in _ranges(entry):
                place = entry.file, entry.offset + start
                if name not in self._chosen:
                    target = np.empty(num_bytes, np.uint8)
                    yield [ArrayRead((place,), AS_IS, target, None)], target
                    continue
                stored, to = format_of(entry.dtype), self._chosen[name].format
                num_weights = num_bytes // stored.block_bytes[0] * stored.block_size
                target = np.empty(to.num_bytes(num_weights), np.uint8)
                worth = self._importance(name, entry, start)
                piece = Piece(0, num_bytes, stored, target, to, worth)
                yield [Read(*place, num_bytes, (piece,))], target

    def _importance(self, name: str, entry: TensorEntry, start: int) -> Importance | None:
        """Return the importance of inputs to the matrix that a tensor has at `start`."""
        tensor, inputs = self._chosen[name].of_experts, self._inputs
        if tensor is None or inputs is None:
            return None
        expert = tensor.expert + start // _matrix_bytes(entry)
        return inputs.importance(tensor.layer, expert, tensor.part == DOWN)

    def _output(self, name: str, entry: TensorEntry) -> OutputTensor:
        if name not in self._chosen:
            return OutputTensor(name, entry.dtype, entry.shape)
        to = self._chosen[name].format.name
        return OutputTensor(packed_name(name, to), BYTES_DTYPE, packed_shape(entry.shape, to))


def in_order(
    reader: FileReader, reads: Iterable[tuple[Sequence[AnyRead], Bytes]], num_ahead: int
) -> Iterator[tuple[Bytes, int]]:
    """Yield each target once its reads have ended, with the bytes read.

    Up to `num_ahead` later reads are under way meanwhile.
    """
    waiting: deque[tuple[Ticket, Bytes]] = deque()
    for asked, target in reads:
        waiting.append((reader.submit(asked), target))
        if len(waiting) > num_ahead:
            ticket, ready = waiting.popleft()
            yield ready, ticket.result()
    for ticket, ready in waiting:
        yield ready, ticket.result()


def _matrix_bytes(entry: TensorEntry) -> int:
    """Return the bytes of one matrix in a tensor."""
    return max(1, entry.num_bytes // max(1, math.prod(entry.shape[:-2])))


def _ranges(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Start and bytes of a tensor's pieces: whole rows, none of two matrices."""
    matrix_bytes = _matrix_bytes(entry)
    row_bytes = max(1, entry.num_bytes // max(1, math.prod(entry.shape[:-1])))
    step = max(1, PIECE_BYTES // row_bytes) * row_bytes
    for first in range(0, entry.num_bytes, matrix_bytes):
        for start in range(0, matrix_bytes, step):
            yield first + start, min(step, matrix_bytes - start)


def _copy_texts(texts: Sequence[Path], folder: Path, out: Path) -> None:
    for path in texts:
        copy = out / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        with whole_file(copy, "file") as file:
            file.write(path.read_bytes())


def _write_index(out: Path, weight_map: Mapping[str, str]) -> None:
    """Write the index of a model of several files."""
    shards = sorted(set(weight_map.values()))
    if len(shards) > 1 or shards != ["model.safetensors"]:
        total_bytes = sum((out / shard).stat().st_size for shard in shards)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(out / INDEX_NAME, index)


def _packed_as(own: WeightFormats, inputs: ExpertInputs | None) -> dict[str, object]:
    of_parts = {"experts": own.experts, "dense": own.dense, "head": own.head}
    packed: dict[str, object] = {"quant_method": PACKED_METHOD, "version": 1, "formats": of_parts}
    if inputs is not None:
        packed["inputs_sha256"] = inputs.digest
    return packed


def _copied(folder: Path) -> list[Path]:
    """Return a model's files that the new folder has unchanged."""
    own = ("config.json", INDEX_NAME)
    found = [*folder.iterdir(), folder / TOOL_TEMPLATE_NAME]
    return sorted(p for p in found if p.suffix in _COPIED and p.is_file() and p.name not in own)


def _write_json(path: Path, value: object) -> None:
    with whole_file(path, "file") as file:
        file.write(json.dumps(value, indent=2).encode())
