"""The bundled models: which there are, and where they lie."""

from __future__ import annotations

from pathlib import Path

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
DEMO_NAMES = ("diffusion", "autoregressive")
OLD_DEMO_NAMES = {"chat": "autoregressive"}
