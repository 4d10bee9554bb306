"""Texts for models: a demo gets questions like those of its training, others our own sources."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from common.record import REPOSITORY
from lowtide import LLM
from lowtide.model_folder.demo_tasks import NUM_TEXT_TURNS, SHORT_TASKS, as_turn, draw


def text_for(model: str) -> str:
    """Return a text for calibrations and prompts, without any question of `held_out_text`."""
    if Path(model).name.startswith("demo"):
        source = random.Random(1)
        turns = (draw(source.choice(SHORT_TASKS), source, False) for _ in range(NUM_TEXT_TURNS))
        return "".join(map(as_turn, turns))
    files = sorted((REPOSITORY / "src" / "lowtide").rglob("*.py"))
    return "".join(path.read_text() for path in files)


def token_ids(llm: LLM, text: str) -> list[int]:
    """A demo's tokens; a synthetic model's tokenizer knows its own words only, so bytes do."""
    if llm.config.vocab_size < 10_000 and llm.tokenizer is not None:
        return list(llm.tokenizer.encode(text))
    return (1 + np.frombuffer(text.encode(), np.uint8).astype(np.int64)).tolist()
