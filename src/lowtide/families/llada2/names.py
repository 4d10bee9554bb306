"""Names of Ling 2.0's tensors, shared by schema and model."""

from __future__ import annotations

from lowtide.schemas.names import Names

NAMES = Names(embedding="model.word_embeddings")
