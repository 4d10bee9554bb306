"""Multiple choice by likelihood, against sums of the model's own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowtide import LLM
from lowtide.decode.forced import ForcedText
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.errors import PlanError, StorageError, UsageError
from lowtide.lab.quality import QualityWork, quality
from lowtide.lab.quality_choices import NUM_MASKS, ChoiceScores, Questions
from lowtide.lab.quality_questions import (
    MAX_CHOICES,
    MAX_QUESTION_CHARS,
    ChoiceQuestion,
    read_questions,
)
from lowtide.lab.quality_settings import QualitySetting
from lowtide.model_folder.hub import resolve_model

FOR = ChoiceQuestion("for i in ran", ("ge(10):\n", "dom\n", "42"), 0)
QUESTIONS = [FOR, ChoiceQuestion("def add(a, b):\n    return", (" a + b\n", " import"), 0)]


def questions(model: str, asked: list[ChoiceQuestion], context: int = 128) -> Questions:
    opened = open_model(model, EngineConfig(context=context))
    facts = opened.facts
    return Questions(asked, facts.tokenizer, facts.config, opened.memory.context.num_tokens)


class Watched:
    """A model, or none that finds anything, that keeps the texts which it is given to read."""

    def __init__(self, llm: LLM | None) -> None:
        self._llm = llm
        self.texts: list[ForcedText] = []

    def read(self, text: ForcedText, see: Any) -> None:
        self.texts.append(text)
        if self._llm is not None:
            self._llm.read(text, see)


def scored(made: Questions, llm: LLM | None) -> tuple[ChoiceScores, list[ForcedText]]:
    watched: Any = Watched(llm)
    return made.score(watched, "", lambda *_: None), watched.texts


def test_an_autoregressive_choice_is_the_sum_of_its_tokens() -> None:
    made = questions("demo:chat", QUESTIONS)
    work = QualityWork(questions=made, repeats=0)
    settings = [QualitySetting("tide"), QualitySetting("lru", residents=0.4)]
    report = quality("demo:chat", settings, work, context=128, dtype="float32")
    with LLM("demo:chat", context=128, dtype="float32") as llm:
        wanted = []
        for question in QUESTIONS:
            sums = []
            for choice in question.choices:
                context = llm.tokenizer.encode(question.context)
                ids = llm.tokenizer.encode(question.context + choice)
                pairs = zip([*context, -1], ids, strict=False)
                first = next(i for i, (a, b) in enumerate(pairs) if a != b)
                log_p = llm.logits(ids).double().log_softmax(1)
                sums.append(sum(float(log_p[i - 1, ids[i]]) for i in range(first, len(ids))))
            wanted.append(sums)
    for row in report.rows:
        for found, sums in zip(row.choices.log_likelihood, wanted, strict=True):
            assert np.allclose(found, sums, rtol=1e-4)
        assert row.choices.agreement.raw.mean == row.choices.agreement.normalised.mean == 1
    right = [
        int(np.argmax(sums)) == one.answer for sums, one in zip(wanted, QUESTIONS, strict=True)
    ]
    accuracy = report.rows[0].choices.accuracy
    assert accuracy.raw.mean == np.mean(right)
    per_byte = [
        int(np.argmax([s / len(c.encode()) for s, c in zip(sums, one.choices, strict=True)]))
        for sums, one in zip(wanted, QUESTIONS, strict=True)
    ]
    assert accuracy.normalised.mean == np.mean([i == 0 for i in per_byte])
    assert report.as_dict()["rows"][0]["choices"]["num_questions"] == 2


def test_a_diffusion_choice_is_its_mean_over_parts_hidden() -> None:
    made = questions("demo:diffusion", [FOR])
    with LLM("demo:diffusion", context=128, dtype="float32") as llm:
        scores, texts = scored(made, llm)
        [found] = scores.log_likelihood
        mask_id = llm.config.decoding.mask_token_id
        for choice, text, value in zip(FOR.choices, texts, found, strict=True):
            ids, num_context = np.asarray(text.token_ids), text.num_context
            assert llm.tokenizer.decode(ids[num_context:].tolist()).endswith(choice)
            assert len(ids) < 32 and len(text.masks) == NUM_MASKS
            wanted = 0.0
            for mask in text.masks:
                row = np.full(32, mask_id)
                row[: len(ids)] = np.where(mask, mask_id, ids)
                log_p = llm.logits(row.tolist()).double().log_softmax(1)
                hidden = np.flatnonzero(mask)
                total = sum(float(log_p[i, ids[i]]) for i in hidden)
                wanted += total * (len(ids) - num_context) / len(hidden) / NUM_MASKS
            assert value == pytest.approx(wanted, rel=1e-4)


def test_long_contexts_lose_their_beginning_and_short_ones_are_refused() -> None:
    long = ChoiceQuestion("import os\n" * 60, ("import", "x = 1\n"), 0)
    made = questions("demo:chat", [long], context=64)
    with LLM("demo:chat", context=64) as llm:
        scores, texts = scored(made, llm)
    assert scores.num_cut == 1 and [len(text.token_ids) for text in texts] == [64, 64]
    with pytest.raises(UsageError, match="it takes 2"):
        questions("demo:chat", [ChoiceQuestion("a", ("b", "c"), 0)])
    with pytest.raises(PlanError, match="raise --context"):
        questions("demo:chat", [ChoiceQuestion("a b c", ("import os\n" * 60, "c"), 0)], context=64)
    assert resolve_model("demo:chat").is_dir()


def write(path: Path, *lines: Any) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts))
    return path


def test_files_of_questions(tmp_path: Path) -> None:
    good = {"context": "a", "choices": ["b", "c"], "answer": 1, "id": 7}
    path = tmp_path / "q.jsonl"
    assert read_questions(write(path, good, "", good)) == [ChoiceQuestion("a", ("b", "c"), 1)] * 2
    odd = {**good, "context": "a\u2028\x85b"}
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(odd, ensure_ascii=False).encode() + b"\r\n")
    assert [question.context for question in read_questions(path)] == [odd["context"]]
    for bad, said in (
        ("{", "line 2 is not JSON"),
        ("[]", "has not all of"),
        ("7", "has not all of"),
        ({"context": "a", "choices": ["b", "c"]}, "has not all of"),
        ({**good, "context": ""}, "context"),
        ({**good, "context": 5}, "context"),
        ({**good, "choices": ["b"]}, "2 to"),
        ({**good, "choices": ["b"] * (MAX_CHOICES + 1)}, "2 to"),
        ({**good, "choices": ["b", ""]}, "none of them empty"),
        ({**good, "choices": "bc"}, "texts"),
        ({**good, "answer": 2}, "0 to 1, not 2"),
        ({**good, "answer": True}, "not True"),
        ({**good, "answer": -1}, "not -1"),
        ({**good, "context": "a\ud800"}, "line 2 has half"),
        ({**good, "choices": ["b", "\udfff"]}, "half of a surrogate"),
        ({**good, "context": "a" * MAX_QUESTION_CHARS}, "line 2 has 1048[0-9]* characters"),
    ):
        with pytest.raises(UsageError, match=said):
            read_questions(write(path, good, bad))
    with pytest.raises(UsageError, match="no question"):
        read_questions(write(path, "", " "))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        read_questions(path)
    with pytest.raises(StorageError, match="cannot be read"):
        read_questions(tmp_path / "none")


@pytest.mark.parametrize("context", ["import os; " * 10_000, "a" * 100_000], ids=["words", "word"])
def test_a_context_of_one_huge_line_is_cut_as_any_other(tmp_path: Path, context: str) -> None:
    path = write(tmp_path / "q", {"context": context, "choices": ["import", "x = 1"], "answer": 0})
    made = questions("demo:chat", read_questions(path), context=64)
    scores, texts = scored(made, None)
    assert scores.num_cut == 1 and [len(text.token_ids) for text in texts] == [64, 64]


def test_logits_stay_what_they_were() -> None:
    """Whoever looks at rows leaves them to whoever comes next."""
    made = questions("demo:chat", [FOR])
    with LLM("demo:chat", context=64) as llm:
        first = made.score(llm, "", lambda *_: None)
        second = made.score(llm, "", lambda *_: None, beside=first)
    assert second.agreement.raw.mean == 1
    for one, other in zip(first.log_likelihood, second.log_likelihood, strict=True):
        assert torch.equal(torch.from_numpy(one), torch.from_numpy(other))
