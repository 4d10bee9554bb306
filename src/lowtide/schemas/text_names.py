"""Tensors of a model that writes text, in the files of one that also reads images or sound."""

from __future__ import annotations

from lowtide.model_folder.checkpoint import Checkpoint

_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
"""Prefixes of these names, and those of the text model's own."""


def with_text_names(checkpoint: Checkpoint, layers: str) -> Checkpoint:
    """Return the checkpoint with the text model's tensors under their own names.

    layers: what names of its layers begin with. A checkpoint that has any is returned as it is.
    """
    names = checkpoint.tensors.keys()
    if any(name.startswith(layers) for name in names):
        return checkpoint
    for theirs, ours in _PREFIXES:
        if any(name.startswith(theirs) for name in names):
            tensors = {
                ours + name.removeprefix(theirs) if name.startswith(theirs) else name: entry
                for name, entry in checkpoint.tensors.items()
            }
            return Checkpoint(checkpoint.files, tensors)
    return checkpoint
