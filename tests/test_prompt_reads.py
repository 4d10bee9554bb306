"""Long prompts with experts on disk: each expert is read once for a chunk, whatever the memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from inside import loop_of
from kind_decoders import causal_decoder
from test_kept_sequences import Case, make_request, run

from lowtide import LLM, SamplingParams
from lowtide.core import Reuse
from lowtide.decode.request import Finished
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.experts.transfer import DiskTransfer
from lowtide.layers.batch import Batch
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.models.decoder import Decoder
from lowtide.reading.file_reader import Ticket

FAMILIES = ("qwen3_moe", "lfm2_moe", "qwen3_5_moe")
"""Keys alone, convolutions, matrices."""

NUM_TOKENS = 900
PROMPT = [(7 * i + i // 11) % 200 for i in range(NUM_TOKENS)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(request.param, "tiny", tmp_path_factory.mktemp("reads") / "model", seed=5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_chunk_reads_each_expert_once_at_most(
    folder: Path, dtype: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an answer has the tokens that it has with all experts in memory."""
    options: dict[str, Any] = {"context": 1024, "dtype": dtype}
    plan = plan_model(folder, **options)
    budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    with LLM(folder, host_memory=plan.full_bytes, **options) as llm:
        [whole] = llm.generate([PROMPT], params)
    passes: list[Counter[tuple[int, int]]] = []
    rows: list[int] = []
    start, forward = DiskTransfer.start, Decoder.forward

    def noting_reads(transfer: DiskTransfer, layer: int, expert: int, slot: int) -> Ticket:
        if passes:
            passes[-1][layer, expert] += 1
        return start(transfer, layer, expert, slot)

    def noting_passes(decoder: Decoder, batch: Batch) -> Any:
        passes.append(Counter())
        rows.append(len(batch.token_ids))
        return forward(decoder, batch)

    monkeypatch.setattr(DiskTransfer, "start", noting_reads)
    with LLM(folder, host_memory=budget, **options) as llm:
        monkeypatch.setattr(Decoder, "forward", noting_passes)
        [found] = llm.generate([PROMPT], params)
        num_read = llm.stats()["num_read"]
    assert found.token_ids == whole.token_ids
    # The whole prompt, in chunks as long as passes are, and the few rows behind a place to copy.
    assert sum(rows) == NUM_TOKENS and rows[0] == MAX_PASS_ROWS
    assert num_read and all(max(reads.values(), default=0) <= 1 for reads in passes)
    assert max(map(len, passes)) <= plan.num_experts


def test_answers_do_not_depend_on_the_length_of_chunks(folder: Path) -> None:
    with LLM(folder, context=1024, dtype="float32", cache="off") as llm:
        answers = set()
        for max_rows in (64, 192, 448, MAX_PASS_ROWS):
            case = Case(1, Reuse.OFF, 1024, max_rows)

            def ask(engine: Any, case: Case = case) -> tuple[int, ...]:
                decoder = causal_decoder(engine.model, engine.kv_cache, case.max_rows)
                finished: dict[int, Finished] = {}
                request = make_request(case, PROMPT, 8, 0)
                decoder.add(request)
                run(decoder, 10_000, finished)
                decoder.close()
                return finished[request.id].token_ids

            answers.add(loop_of(llm).run(ask))
    assert len(answers) == 1
