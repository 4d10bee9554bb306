"""The names of the Ling 2.0 body's tensors, which schema and model share."""

from __future__ import annotations

from lowtide.schemas.names import Names

NAMES = Names(embedding="model.word_embeddings")
