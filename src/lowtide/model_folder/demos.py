"""The bundled models: which there are, and where they lie."""

from __future__ import annotations

from pathlib import Path

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
DEMO_NAMES = ("diffusion", "autoregressive")
OLD_DEMO_NAMES = {"chat": "autoregressive"}


def tokenizer_file(folder: Path) -> Path:
    """Where a model's `tokenizer.json` is, if it has one: the demos share the one beside them."""
    shared = DEMO_FOLDER / "tokenizer.json"
    is_demo = folder.resolve().parent == DEMO_FOLDER.resolve()
    return shared if is_demo else folder / shared.name
