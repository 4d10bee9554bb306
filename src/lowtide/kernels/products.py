"""The host's products with stored weights: compiled ones where there is a compiler, else torch's.

Chosen once for an engine and handed to everything that computes on the host, so that an expert's
bits do not depend on where it runs. Unlike routing's, the two give different bits: sums are added
in another order.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.errors import StorageError, UnsupportedError
from lowtide.kernels import reference
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.reference import ClampedWeights, ExpertWeights

_log = logging.getLogger(__name__)


class Products(NamedTuple):
    """What multiplies with a weight, and what runs an expert or comes between products."""

    name: str  # of where they come from, for people and stored costs
    multiply: Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
    """As `reference.multiply`."""
    gated_mlp: Callable[[Tensor, ExpertWeights | ClampedWeights, Tensor, Tensor, Tensor], None]
    """As `reference.gated_mlp`."""
    few_rows: FewRows | None = None
    """Compiled operators beside products, where there are any, for the rows that they take."""


REFERENCE = Products("torch", reference.multiply, reference.gated_mlp)


def choose_products(kernels: str, dtype: torch.dtype) -> Products:
    """The products of an engine that computes in `dtype`; `kernels`: `auto` or `reference`.

    Where nothing can be compiled `auto` is the reference too, with one notice in the log.
    """
    if kernels == "reference" or dtype != torch.bfloat16:
        return REFERENCE
    return _compiled()


@functools.cache
def _compiled() -> Products:
    try:
        few_rows = FewRows.load()
    except (StorageError, UnsupportedError) as error:
        _log.warning("%s Single tokens will take longer: torch's products are used.", error)
        return REFERENCE
    return Products("compiled", few_rows.multiply, few_rows.gated_mlp, few_rows)
