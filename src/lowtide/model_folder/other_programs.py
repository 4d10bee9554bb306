"""GGUF files in the folders of LM Studio and Ollama, which are only read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lowtide.model_folder.gguf_file import gguf_models
from lowtide.model_folder.ollama_names import model_folders, ollama_files


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A model fetched by another program, known here by its path."""

    name: str
    program: str
    num_bytes: int
    path: Path


def other_files() -> list[OtherFile]:
    """List all models in these folders once, by program and name."""
    found: dict[Path, OtherFile] = {}
    for folder in lm_studio_folders():
        for each in _lm_studio_files(folder):
            found.setdefault(each.path, each)
    for folder in model_folders():
        for name, path in ollama_files(folder):
            with suppress(OSError):
                size = path.stat().st_size
                found.setdefault(path, OtherFile(name, "Ollama", size, path))
    return sorted(found.values(), key=lambda each: (each.program, each.name))


def lm_studio_folders() -> list[Path]:
    """List LM Studio's model folders: the current one and that of older versions."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home
        return []
    return [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def _lm_studio_files(folder: Path) -> Iterator[OtherFile]:
    """Yield PUBLISHER/REPOSITORY/NAME.gguf, for a split model its first file.

    Files that are unreadable or disappear are skipped.
    """
    with suppress(OSError):
        for repository in sorted(folder.glob("*/*")):
            names = [path.name for path in repository.glob("*.gguf") if path.is_file()]
            for stem, files in gguf_models(names).items():
                size = sum((repository / file).stat().st_size for file in files)
                name = f"{repository.parent.name}/{repository.name}: {stem}"
                yield OtherFile(name, "LM Studio", size, repository / files[0])
