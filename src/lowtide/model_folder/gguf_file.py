"""Which GGUF file is meant: by its path, or as the only model of a folder."""

from __future__ import annotations

import re
from pathlib import Path

from lowtide.errors import CheckpointError

SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
"""The name of one of several files: the first has number 1."""


def is_gguf(path: Path) -> bool:
    """Whether a model's path is that of a GGUF file, not of a folder."""
    return path.suffix == ".gguf" and not path.is_dir()


def first_gguf(folder: Path) -> Path | None:
    """The one GGUF model in a folder; None if there is none. Raises CheckpointError for several."""
    files = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))
    splits = [SPLIT.fullmatch(path.name) for path in files]
    pairs = zip(files, splits, strict=True)
    firsts = [path for path, split in pairs if split is None or int(split[2]) == 1]
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts[:4])
        raise CheckpointError(
            f"{folder} holds {len(firsts)} GGUF models ({names}); give the path of one of them."
        )
    if files and not firsts:
        raise CheckpointError(f"{folder} holds {files[0].name}, but not the first of its files.")
    return firsts[0] if firsts else None
