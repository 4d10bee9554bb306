"""Choice of a GGUF file: by path, as a folder's only model, or by tag on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lowtide.errors import CheckpointError
from lowtide.files.regular_file import FETCH_AGAIN, open_regular, read_from

MAGIC = b"GGUF"
SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
"""Name of one of several files; the first has number 1."""

USUAL_TAGS = ("Q4_K_M", "Q4_0", "Q8_0", "MXFP4")
"""Quantisations chosen, in this order, from a repository if no tag is given."""

_TAG = re.compile(r"(?:UD-)?(?:I?Q[0-9]\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE | re.ASCII)


def is_gguf(path: Path) -> bool:
    """Return True if a path is a GGUF file, by its name or, for files without suffix, first bytes.

    Raises CheckpointError for a file that cannot be read.
    """
    if path.is_dir() or not path.exists():
        return False
    if path.suffix == ".gguf":
        return True
    if not path.is_file():
        return False
    with open_regular(path, CheckpointError, FETCH_AGAIN) as (stream, _):
        return read_from(stream, len(MAGIC), path, CheckpointError) == MAGIC


def first_gguf(folder: Path) -> Path | None:
    """Return a folder's only GGUF model, or None. Raises CheckpointError for several."""
    models = gguf_models(path.name for path in folder.glob("*.gguf"))
    if len(models) > 1:
        names = ", ".join(files[0] for files in list(models.values())[:4])
        raise CheckpointError(
            f"{folder} holds {len(models)} GGUF models ({names}); give the path of one of them."
        )
    for files in models.values():
        split = SPLIT.fullmatch(files[0])
        if split is not None and int(split[2]) != 1:
            raise CheckpointError(
                f"{folder} holds {files[0]}, but not the first of its files; fetch the others, too."
            )
        return folder / files[0]
    return None


def gguf_models(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Group files into GGUF models by their path without number and suffix.

    Each has all its files in order. Files that accompany models (image projectors, importance
    matrices) are left out.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        last = name.rpartition("/")[2].lower()
        if last.endswith(".gguf") and not last.startswith(("mmproj", "imatrix")):
            split = SPLIT.fullmatch(name)
            models.setdefault(split[1] if split else name.removesuffix(".gguf"), []).append(name)
    return {stem: tuple(files) for stem, files in models.items()}


def is_whole(files: tuple[str, ...]) -> bool:
    """Return True if a model's files are complete by their numbering."""
    split = SPLIT.fullmatch(files[0])
    return split is None or len(files) == int(split[3])


def tag_of(stem: str) -> str:
    """Return the tag of a model in its repository: its quantisation, or its name."""
    found = _TAG.search(stem)
    return found[0] if found else f"{stem.rpartition('/')[2]}.gguf"


def choose_gguf(
    models: Mapping[str, tuple[str, ...]], tag: str | None, where: str
) -> tuple[str, ...]:
    """Return the files of the model that a tag names, or without one the only or a usual model.

    tag: a quantisation, in any case, or a file's path.

    Raises CheckpointError, naming the available tags, if none or several match.
    """
    if tag is None and len(models) == 1:
        return next(iter(models.values()))
    for wanted in USUAL_TAGS if tag is None else (tag,):
        named = {s: files for s, files in models.items() if _is_named(wanted, s, files)}
        exact = [files for s, files in named.items() if tag_of(s).lower() == wanted.lower()]
        found = exact or list(named.values())
        if len(found) == 1:
            return found[0]
        if found and tag is not None:
            names = ", ".join(files[0] for files in found)
            raise CheckpointError(f"{where}: {tag} may be {names}; give one of these after the :.")
    tags = ", ".join(sorted(map(tag_of, models))[:40])
    asked = "names none of its GGUF models" if tag is not None else "holds several GGUF models"
    raise CheckpointError(f"{where} {asked}; give one as ORG/NAME:TAG. Tags: {tags}.")


def _is_named(tag: str, stem: str, files: tuple[str, ...]) -> bool:
    if tag.lower().endswith(".gguf"):
        return tag in files or tag in (name.rpartition("/")[2] for name in files)
    stem, tag = stem.lower(), tag.lower()
    return stem == tag or (stem.endswith(tag) and stem[-len(tag) - 1] in "-._/")
