"""Writes README.md's table of models: what each takes of disk and memory, by the planner's word.

python tools/models_table.py

The published sizes are those of `families/*/sizes.json`; no weight is read or fetched. A test
compares the table with what the planner says now.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lowtide.errors import UnsupportedError
from lowtide.families import SynthSize, families
from lowtide.llm import plan_model
from lowtide.model_writing.safetensors_writer import header_bytes
from lowtide.model_writing.synth import plan_shards
from lowtide.model_writing.synth_weights import tensors_of

README = Path(__file__).parents[1] / "README.md"
BEGINS, ENDS = "<!-- models -->", "<!-- end of models -->"
FORMATS = ("own", "q8", "q4")
CONTEXT_TOKENS = 4096
GIB = 1 << 30

_PLENTY_BYTES = 1 << 43  # a budget that nothing is refused for


class Needs(NamedTuple):
    """Bytes that a model needs in one format."""

    disk_bytes: int  # its own files, or those that `lowtide pack` writes
    least_bytes: int  # of budget that runs
    all_bytes: int  # with all of it in memory


class Model(NamedTuple):
    """A row: needs by format; None: it is not made into that one."""

    hub_id: str
    kind: str
    needs: dict[str, Needs | None]


def models() -> Iterator[Model]:
    """Every published size that has a name on the hub, the smallest first."""
    found = [
        _model(size) for f in families().values() for size in f.sizes().values() if size.hub_id
    ]
    return iter(sorted(found, key=lambda model: (model.needs["own"] or (0,))[0]))


def table() -> str:
    """The table, without its marks."""
    head = "| model | kind | as published | `--format q8` | `--format q4` |"
    return "\n".join([head, "|---|---|---|---|---|", *map(_row, models())])


def written() -> str:
    """The table that README.md has."""
    text = README.read_text(encoding="utf-8")
    return text.split(BEGINS)[1].split(ENDS)[0].strip()


def numbers(text: str) -> list[float]:
    """All sizes of a table, for a comparison that heeds no rounding."""
    return [float(number) for number in re.findall(r"(?<![\w.-])\d+\.\d+(?= |$)", text)]


def _model(size: SynthSize) -> Model:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(size.config), encoding="utf-8")
        if "quantization_config" in size.config:
            _write_headers(folder, size)
        needs = {format: _needs(folder, size, format) for format in FORMATS}
        return Model(str(size.hub_id), _kind(folder), needs)


def _write_headers(folder: Path, size: SynthSize) -> None:
    """Write the shards, which tell the formats of tensors, with holes in place of weights."""
    shards = plan_shards(list(tensors_of(size)), size.max_shard_bytes)
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.write_bytes(header_bytes([tensor.output for tensor in shard], {}))
        num_bytes = sum(tensor.output.num_bytes for tensor in shard)
        os.truncate(path, path.stat().st_size + num_bytes)


def _needs(folder: Path, size: SynthSize, format: str) -> Needs | None:
    try:
        plan = plan_model(
            folder,
            device="cpu",
            host_memory=_PLENTY_BYTES,
            context=CONTEXT_TOKENS,
            **({} if format == "own" else {"format": format}),
        )
    except UnsupportedError:
        return None
    disk_bytes = sum(tensor.output.num_bytes for tensor in tensors_of(size))
    if format != "own":
        disk_bytes = plan.host.dense_bytes + plan.num_experts * plan.host.slot_bytes
    return Needs(disk_bytes, plan.minimum_bytes, plan.full_bytes)


def _kind(folder: Path) -> str:
    from lowtide.model_folder.model_config import load_config

    config = load_config(folder, {})
    if not config.decoding.keeps_keys:
        return "diffusion, bidirectional"
    return "autoregressive" if config.decoding.writes_in_order else "diffusion, by blocks"


def _row(model: Model) -> str:
    cells = [_cell(model.needs[format]) for format in FORMATS]
    return " | ".join([f"| `{model.hub_id}`", model.kind, *cells]) + " |"


def _cell(needs: Needs | None) -> str:
    """Disk, and memory from the least to all."""
    if needs is None:
        return "no"
    disk, least, most = (f"{num_bytes / GIB:.1f}" for num_bytes in needs)
    memory = least if least == most else f"{least} to {most}"
    return f"{disk} · {memory}"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGINS)
    after = rest.split(ENDS)[1]
    README.write_text(f"{before}{BEGINS}\n{table()}\n{ENDS}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
