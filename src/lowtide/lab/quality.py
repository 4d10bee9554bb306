"""`lowtide quality`: measures the effect of settings on a model's words and speed.

A text goes through the model in decoding's own passes under every setting. The tokens are the same;
residents, and the handling of absent experts, differ. Every row is compared with the first
setting's,
which is exact: likelihood, the likeliest token, and KL of the whole distribution. Then settings of
one loaded model take turns at writing, for their speed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.cli.options import FLAGS
from lowtide.config import ModelConfig
from lowtide.core import hit_rate
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.running.forcing import ForcedRun
from lowtide.errors import PlanError, UsageError
from lowtide.files.folders import cache_folder
from lowtide.lab.bench import Load, Preset, PresetRun, take_turns
from lowtide.lab.quality_choices import ChoiceScores, Questions
from lowtide.lab.quality_scores import (
    Comparison,
    ReferenceLogits,
    RowScores,
    ScoredRows,
    Scorer,
    by_mask,
)
from lowtide.lab.quality_settings import QualitySetting, grouped, opening_options
from lowtide.lab.quality_text import Scope, TextSample, encode, make_sample
from lowtide.llm import LLM, check_request
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.option import in_words
from lowtide.params import SamplingParams
from lowtide.plan import AUTO_FORMAT, OWN_FORMAT, MemoryPlan
from lowtide.policies.receipt import Receipt
from lowtide.progress import Progress

SPEED_PROMPT_TOKENS = 64

NOT_OF_PASSES = ("hit_rate", "committed_tokens", "forwards", "generation_s", "tokens_per_s")
"""Engine counters that do not add up over passes, or that count answers."""


class QualityWork(NamedTuple):
    """The measurements to make of every setting."""

    token_ids: Sequence[int] = ()  # of the text; none: it is not scored
    bos: Sequence[int] = ()
    scope: Scope = Scope()
    questions: Questions | None = None
    max_tokens: int = 64  # of the answers whose speed is taken
    repeats: int = 3  # of those; 0: no speed is taken
    text_sha256: str = ""

    def with_text(self, tokenizer: Tokenizer | None, text: str) -> QualityWork:
        """Return the same work with a text to score. Raise UsageError without a tokenizer."""
        ids, bos = encode(tokenizer, text)
        if not ids:
            raise UsageError("The text is empty; give one with some pages.")
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self._replace(token_ids=ids, bos=bos, text_sha256=digest)


class Passes(NamedTuple):
    """Counters of the passes over the scored windows, prompts included."""

    num_tokens: int  # scored
    num_passes: int
    seconds: float
    counts: Mapping[str, float]  # of the engine's counters, by how much they grew
    replaced: Receipt | None = None  # of all texts, by a policy that may replace experts

    @property
    def passes_per_s(self) -> float:
        return self.num_passes / self.seconds

    def per_pass(self, name: str) -> float:
        return self.counts.get(name, 0.0) / self.num_passes

    def as_dict(self) -> dict[str, object]:
        activated = self.counts["num_hits"] + self.counts["num_misses"]
        return {
            "num_tokens": self.num_tokens,
            "num_passes": self.num_passes,
            "passes_per_s": self.passes_per_s,
            "hit_rate": hit_rate(self.counts["num_hits"], activated),
            "read_bytes_per_pass": self.per_pass("read_bytes"),
            "link_bytes_per_pass": self.per_pass("link_bytes"),
            "replaced": None if self.replaced is None else self.replaced.as_dict(),
            "counts": dict(self.counts),
        }


@dataclass(slots=True)
class Row:
    """One setting's measurements, or the reason why it cannot run."""

    setting: QualitySetting
    policy: str = ""  # in force
    budget_bytes: int = 0
    resident_share: float = 0.0
    reason: str = ""
    scores: RowScores = field(default_factory=RowScores.none)
    comparison: Comparison | None = None
    of_ratio: Mapping[float, Comparison] = field(default_factory=dict)
    passes: Passes | None = None
    choices: ChoiceScores | None = None
    speed: PresetRun | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Committed answer tokens per second, the median of turns."""
        if self.speed is None or not self.speed.turns:
            return None
        return self.speed.tokens_per_s.median

    @property
    def moved_share(self) -> float:
        """The replaced share of the router's mass over the text."""
        replaced = None if self.passes is None else self.passes.replaced
        return 0.0 if replaced is None else replaced.moved_share

    def as_dict(self) -> dict[str, Any]:
        named = {"label": self.setting.label, "setting": self.setting.as_dict()}
        if self.reason:
            return {**named, "reason": self.reason}
        ratios = {f"{ratio:g}": one.as_dict() for ratio, one in self.of_ratio.items()}
        return {
            **named,
            "policy": self.policy,
            "budget_bytes": self.budget_bytes,
            "resident_share": self.resident_share,
            "tokens_per_s": self.tokens_per_s,
            "text": None if self.comparison is None else self.comparison.as_dict(),
            "of_mask_ratio": ratios,
            "passes": None if self.passes is None else self.passes.as_dict(),
            "choices": None if self.choices is None else self.choices.as_dict(),
            "speed": None if self.speed is None else self.speed.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class QualityReport:
    """All rows; the first one is the reference."""

    rows: tuple[Row, ...]
    sample: TextSample | None
    scored: ScoredRows | None  # the rows of logits, the same of every setting
    text_sha256: str
    architecture: str
    device: str

    @property
    def has_masks(self) -> bool:
        """True if masked tokens were predicted, instead of each token from those before it."""
        return self.sample is not None and bool(self.sample.mask_ratios)

    def as_dict(self) -> dict[str, Any]:
        sample = self.sample
        return {
            "architecture": self.architecture,
            "device": self.device,
            "text_sha256": self.text_sha256,
            "num_tokens": 0 if sample is None else sample.num_tokens,
            "num_windows": 0 if sample is None else len(sample.scored),
            "mask_ratios": [] if sample is None else list(sample.mask_ratios),
            "rows": [row.as_dict() for row in self.rows],
        }


def quality(
    model: str | Path,
    settings: Sequence[QualitySetting],
    work: QualityWork,
    *,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> QualityReport:
    """Measure every setting against the first one, or against a lossless one added before it.

    If rows are rounded by default, unrounded rows are an additional setting. options: `LLM`'s,
    shared by all settings, without a policy. A setting that cannot run at its budget is a row with
    its reason, except the reference. Raises as `LLM` does, UsageError if there is nothing to
    measure, and PlanError if answers do not fit into a context, before measuring.
    """
    opened = open_model(model, EngineConfig(**options))
    config, asked = opened.facts.config, opened.options.asked
    sample = _sample(config, opened.memory.context.num_tokens, asked.seed or 0, work)
    judge = _Judge(model, options, work, sample, progress)
    rounds_by_default = asked.activations == AUTO_FORMAT and bool(opened.memory.rounded)
    num_rows = sample.num_rows if sample is not None else 0
    groups = list(grouped(_with_own_rows(settings, rounds_by_default)))
    judge.check_answers()
    folder = cache_folder()  # on a disk, as `/tmp` often is not
    with ReferenceLogits(num_rows, config.vocab_size, folder) as reference:
        for group in groups:
            judge.measure(group, reference)
    return QualityReport(
        tuple(judge.rows),
        sample,
        judge.scored,
        work.text_sha256,
        config.architecture,
        judge.plan.device if judge.plan is not None else "",
    )


@dataclass(slots=True)
class _Judge:
    """Measures settings group by group, each against the first of all."""

    model: str | Path
    options: Mapping[str, Any]  # of the model, those that all settings share
    work: QualityWork
    sample: TextSample | None
    progress: Progress
    rows: list[Row] = field(default_factory=list)
    scored: ScoredRows | None = None
    plan: MemoryPlan | None = None

    def check_answers(self) -> None:
        """Raise UsageError or PlanError, after scoring, if answers could not be timed."""
        if self.work.repeats:
            check_request(self.model, lambda _: self._prompt(), self._params(), **self.options)

    def measure(self, group: Sequence[QualitySetting], reference: ReferenceLogits) -> None:
        """Measure the settings of one loaded model."""
        options = opening_options(self.model, group, self.options)
        options = {**options, "cache_dir": None}  # every setting computes everything
        with LLM(self.model, progress=self.progress, **options) as llm:
            self.plan = llm.plan
            rows = []
            for setting in group:
                row = Row(setting)
                self.rows.append(row)
                try:
                    llm.adopt_policy(setting.policy, setting.policy_options)
                except (PlanError, UsageError) as error:  # known by name: it is the budget
                    if len(self.rows) == 1:
                        raise
                    row.reason = in_words(str(error), FLAGS)
                    continue
                rows.append(row)
                self._judge(llm, row, reference)
            if self.work.repeats:
                self._time(llm, rows)

    def _judge(self, llm: LLM, row: Row, reference: ReferenceLogits) -> None:
        plan = llm.plan
        row.policy, row.budget_bytes = plan.policy, plan.budget_bytes
        row.resident_share = sum(plan.residents_per_layer) / max(1, plan.num_experts)
        if self.sample is not None:
            self._score(llm, row, self.sample, reference)
        if self.work.questions is not None:
            first = self.rows[0].choices
            row.choices = self.work.questions.score(
                llm, row.setting.label, self.progress, beside=first
            )

    def _score(self, llm: LLM, row: Row, sample: TextSample, reference: ReferenceLogits) -> None:
        scorer = Scorer(sample, reference, is_reference=row is self.rows[0])
        llm.read(sample.warm_up, _look_away)
        before, runs = llm.stats(), []
        for index, text in enumerate(sample.scored):
            self.progress(row.setting.label, index, len(sample.scored))
            scorer.begin(text)
            runs.append(llm.read(text, scorer))
        self.progress(row.setting.label, len(sample.scored), len(sample.scored))
        row.passes = _passes(sample, runs, before, llm.stats())
        row.scores, self.scored = scorer.finish()
        exact = self.rows[0].scores
        row.comparison = Comparison.of(row.scores, exact, self.scored)
        row.of_ratio = by_mask(row.scores, exact, self.scored, sample.mask_ratios)

    def _time(self, llm: LLM, rows: Sequence[Row]) -> None:
        """Time the settings, which take turns at answering one prompt."""
        prompt = self._prompt()
        presets = [Preset(row.setting.policy, row.setting.policy_options) for row in rows]
        load = Load(prompt, prompt, self._params())
        runs = take_turns(llm, presets, load, self.work.repeats, self.progress)
        for row, run in zip(rows, runs, strict=True):
            row.speed = run

    def _params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.work.max_tokens, ignore_eos=True, temperature=0.0)

    def _prompt(self) -> list[int]:
        if self.sample is not None:
            return list(self.sample.scored[0].token_ids[:SPEED_PROMPT_TOKENS])
        assert self.work.questions is not None
        return self.work.questions.prompt()[:SPEED_PROMPT_TOKENS]


def _with_own_rows(
    settings: Sequence[QualitySetting], rounds_by_default: bool
) -> Sequence[QualitySetting]:
    """Put a setting with unrounded rows first if rows are rounded by default."""
    first = settings[0]
    if not rounds_by_default or "activations" in first.options:
        return settings
    own = {**first.options, "activations": OWN_FORMAT}
    return [QualitySetting(options=own, residents=first.residents), *settings]


def _sample(config: ModelConfig, context: int, seed: int, work: QualityWork) -> TextSample | None:
    if not len(work.token_ids):
        if work.questions is None:
            raise UsageError("The text has no tokens, and there are no questions to answer.")
        return None
    return make_sample(config, context, work.token_ids, work.bos, work.scope, seed)


def _passes(
    sample: TextSample,
    runs: Sequence[ForcedRun],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> Passes:
    receipts = [run.receipt for run in runs if run.receipt is not None]
    return Passes(
        sample.num_tokens,
        sum(run.num_passes for run in runs),
        sum(run.seconds for run in runs),
        {n: after[n] - before.get(n, 0.0) for n in after if n not in NOT_OF_PASSES},
        Receipt.total(receipts) if receipts else None,
    )


def _look_away(mask: int, positions: object, logits: object) -> None:
    """Ignore the logits: the warm-up is not scored."""
