"""Statistics of rows of logits for models of tests, from all of their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.decode.logits import LOGIT_ROWS, Model
from lowtide.kernels.row_statistics import Form, Guidance, RowStatistics, Wanted


class RowStatisticsFromLogits:
    """Gives a model that has `logits` the statistics that masked diffusion asks for."""

    def row_statistics(
        self: Model,
        hidden: Tensor,
        rows: Tensor,
        wanted: Wanted,
        guidance: Guidance | None = None,
        form: Form = Form.FUSED,
    ) -> RowStatistics:
        def logits_of(rows: Tensor) -> Tensor:
            parts = hidden.index_select(0, rows).split(LOGIT_ROWS)
            return torch.cat([self.logits(part).clone() for part in parts])

        logits = logits_of(rows)
        if guidance is not None:
            other = logits_of(guidance.rows)
            logits = other + guidance.factors[:, None] * (logits - other)
        greatest, best = logits.max(-1)
        p = logits.double().softmax(-1)
        return RowStatistics(
            logits.argmax(-1),
            greatest,
            p.gather(-1, best[:, None])[:, 0],
            p.sort(descending=True).values[:, 1] if wanted.second else None,
            torch.special.entr(p).sum(-1) if wanted.entropy else None,
        )
