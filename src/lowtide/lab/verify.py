"""`lowtide verify`: proves that placement affects only speed.

The same text goes through a model with every expert resident (or as many as this machine holds),
and through runs that hold fewer, on every device and under every lossless preset. Each MoE layer's
output, the logits, and the tokens of a whole answer are compared.

A bidirectional model's text is longer than a tile of any operator, so that its passes are divided
further at the least budget than in the reference. A policy that changes words may be added; its
difference is shown, not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.cli.options import FLAGS
from lowtide.config import ModelConfig
from lowtide.core import Step, hit_rate
from lowtide.devices.kind import KINDS, OWN_DEVICES
from lowtide.engine.opening.config import MAX_PASS_ROWS, EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.errors import PlanError
from lowtide.experts.rows import Routing, is_long
from lowtide.lab.budgets import budget_of_share, home_of_share
from lowtide.lab.emulated.kind import EMULATED
from lowtide.llm import LLM, plan_model
from lowtide.memory.chunking import MAX_REMAINDER, OPERATOR_TILES
from lowtide.option import in_words
from lowtide.params import DiffusionParams, SamplingParams
from lowtide.plan import MemoryPlan, WeightFormats
from lowtide.policies.presets import AUTO, lossless_presets

SHARES = (0.0, 1 / 3, 2 / 3)
"""Shares of experts that are resident, ascending; none with the least budget."""

NUM_PROMPT_TOKENS = 40

LONG_TEXT_TOKENS = max(OPERATOR_TILES.values()) + 2 * (MAX_REMAINDER + 1)
"""Tokens of a bidirectional model's text: two tiles of every operator."""

LONG_ANSWER_TOKENS = OPERATOR_TILES["logits"] + 2 * (MAX_REMAINDER + 1)
"""Masks in that text, written in one step."""

MAX_LOGIT_ROWS = 64
"""Rows of the text whose logits are kept of every run."""

EMULATED_SPEEDS = {"link_GBps": "2", "link_latency_us": "20", "host_slowdown": "1"}
"""Default speeds of an emulated device, which need not be slow: they do not change results."""

INEXACT_DEVICES = ("cuda",)
"""Devices whose sums have another order than the CPU's; `TOLERANCES` are theirs."""

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}
"""Allowed difference of a layer's values from the reference's, as a share of the largest, if a GPU
takes part: its sums have another order than the CPU's. Elsewhere every bit is equal.

With a GPU every layer gets the reference's input and routing. A free-running model would continue
from its own rounding: a token in a hundred then goes to another expert, and differs by far more
(docs/log). So logits and tokens are shown, not judged."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One offloaded run compared with the reference run.

    Differences are the largest of any element, as a share of the reference's largest element; 0.0
    is bit-identical.
    """

    device: str
    policy: str
    budget_bytes: int  # of the fast tier
    host_budget_bytes: int
    num_residents: int
    tolerance: float
    hit_rate: float = 0.0
    largest_layer_difference: float = 0.0  # of any MoE layer's output
    first_layer: int | None = None  # the first MoE layer that differs by more than the tolerance
    largest_logit_difference: float = 0.0
    first_token: int | None = None  # the first token of the answer that differs
    num_equal_tokens: int = 0  # of the answer
    num_tokens: int = 0
    is_lossless: bool = True  # by the policy's promise
    formats: WeightFormats = field(default_factory=WeightFormats)  # of both runs' weights
    num_long_tokens: int = 0  # of a pass of more rows than a tile has; 0: there was none
    divided: Mapping[str, int] = field(default_factory=dict)
    """Operators that this run divided into more chunks in that pass than the reference did."""
    reason: str = ""  # why the policy cannot run at this budget: then nothing was compared

    @property
    def is_same(self) -> bool:
        """True if all layers are within the tolerance; if that is 0, also logits and answer."""
        if self.first_layer is not None:
            return False
        is_all_same = not self.largest_logit_difference and self.first_token is None
        return is_all_same or self.tolerance > 0


class Lossy(NamedTuple):
    """A policy that changes words, and its options."""

    policy: str
    options: Mapping[str, str]


class _Case(NamedTuple):
    """A device and how much of the experts it holds."""

    device: str
    options: Mapping[str, Any]  # of `LLM`, budgets among them
    tolerance: float


class _LayerCopy(NamedTuple):
    """Input and output of a MoE layer, as copies on the CPU."""

    layer: int
    step: Step
    x: Tensor
    routing: Routing
    out: Tensor


class _RunTask(NamedTuple):
    """Inputs of every run."""

    text: Sequence[int]  # whose logits are asked for
    prompt: Sequence[int]
    params: SamplingParams


class _Run(NamedTuple):
    """Recorded results of a run."""

    layers: list[_LayerCopy]  # of the text
    logits: Tensor  # float32 [rows, vocab]; of a long text some of its rows
    num_text: int
    token_ids: list[int]  # of the answer; then, of a long text, what one step writes
    hit_rate: float
    chunks: Mapping[str, int]  # of that step


def verify(
    model: str | Path,
    prompt: Sequence[int] | None = None,
    max_tokens: int = 24,
    on_verdict: Callable[[Verdict], None] | None = None,
    lossy: Lossy | None = None,
    **options: Any,
) -> list[Verdict]:
    """Compare runs at several budgets, the least included, with reference runs.

    On the CPU, on the GPU if there is one, and on an emulated device if requested; a GPU is
    compared with itself holding as many experts as possible.

    prompt: token ids, by default seeded random ones. lossy: a policy that changes words, shown at
    every budget too. options: `LLM`'s, except budgets and policy. Without a context, a
    bidirectional model's is its text; only then are its passes divided at the least budget. Raises
    as `LLM` does.
    """
    options = {**options, "cache_dir": None}  # every run computes everything
    opened = open_model(model, EngineConfig(**options))
    task = _task(opened.facts.config, prompt, max_tokens, options.get("context"))
    if is_long(len(task.text)):
        options = {"context": len(task.text), **options}
    verdicts, references = [], dict[str, _Run]()
    for case in _cases(model, options, TOLERANCES[opened.memory.dtype]):
        compared_with = "cuda" if case.device == "cuda" else "cpu"
        if compared_with not in references:
            whole = _on_device(options, compared_with)
            references[compared_with] = _reference(model, whole, task)
        rows = _verdicts(model, case, references[compared_with], task)
        if lossy is not None:
            rows = chain(rows, _lossy(model, case, lossy, references[compared_with], task))
        for verdict in rows:
            verdicts.append(verdict)
            if on_verdict is not None:
                on_verdict(verdict)
    return verdicts


def _task(
    config: ModelConfig, prompt: Sequence[int] | None, max_tokens: int, context: int | None
) -> _RunTask:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    if prompt is not None:
        return _RunTask(prompt, prompt, params)
    num_tokens = NUM_PROMPT_TOKENS
    if not config.decoding.keeps_keys:
        limit = min(config.max_positions, context or LONG_TEXT_TOKENS)
        num_tokens = max(num_tokens, min(limit, LONG_TEXT_TOKENS))
    text = random_prompt(config, num_tokens)
    return _RunTask(text, text[:NUM_PROMPT_TOKENS], params)


def _reference(model: str | Path, options: Mapping[str, Any], task: _RunTask) -> _Run:
    """Run the reference; its weights are freed at the end, so that the next run has room."""
    with LLM(model, **options) as llm:
        return _run(llm, task)


def random_prompt(config: ModelConfig, num_tokens: int = NUM_PROMPT_TOKENS) -> list[int]:
    """Draw seeded ids of text tokens.

    Special tokens are at the end of the vocabulary, or named in the config.
    """
    special = {config.decoding.mask_token_id, config.pad_token_id, *config.eos_token_ids}
    ordinary = [i for i in range(config.vocab_size) if i not in special]
    random = np.random.default_rng(0)
    return [ordinary[i] for i in random.integers(len(ordinary), size=num_tokens)]


def _cases(
    model: str | Path, options: Mapping[str, Any], inexact_tolerance: float
) -> Iterator[_Case]:
    """Yield every device with every budget.

    The least device budget has half of the experts on disk; without experts it is the only one.
    """
    for device in _devices(str(options.get("device", "auto"))):
        whole = _on_device(options, device)
        plan = plan_model(model, **whole)
        tolerance = inexact_tolerance if device in INEXACT_DEVICES else 0.0
        for share in SHARES if plan.num_experts else SHARES[:1]:
            yield _Case(device, {**whole, **_budgets(plan, share)}, tolerance)


def _devices(asked: str) -> list[str]:
    if asked not in OWN_DEVICES:
        return ["cpu", asked]
    has_gpu = asked != "cpu" and torch.cuda.is_available()
    return ["cpu", "cuda"] if has_gpu else ["cpu"]


def _on_device(options: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return options that hold everything there; device options only for a registered device."""
    chosen = {**options, "device": device}
    given = chosen.pop("device_options", None)
    if device in OWN_DEVICES:
        return chosen
    speeds = EMULATED_SPEEDS if KINDS[device] is EMULATED else {}
    return {**chosen, "device_options": given or speeds}


def _budgets(plan: MemoryPlan, share: float) -> dict[str, int]:
    budget_bytes = budget_of_share(plan, share) if share else plan.minimum_bytes
    if plan.gpu is None:
        return {"host_memory": budget_bytes}
    home = {} if share else {"host_memory": home_of_share(plan, 0.5)}
    return {"gpu_memory": budget_bytes, **home}


def _verdicts(model: str | Path, case: _Case, reference: _Run, task: _RunTask) -> Iterator[Verdict]:
    """Yield a verdict for each preset; the model is loaded once."""
    with LLM(model, **case.options) as llm:
        for policy in lossless_presets() if llm.plan.num_experts else (AUTO,):
            verdict = _verdict(case, llm.plan, policy)
            try:
                llm.adopt_policy(policy)
            except PlanError as error:
                yield replace(verdict, reason=in_words(str(error), FLAGS))
            else:
                run = _run(llm, task)
                if case.tolerance:
                    # What the experts make of each layer's input and routing, by themselves.
                    given = [seen._replace(out=_experts_of(llm, seen)) for seen in reference.layers]
                    run = run._replace(layers=given)
                yield _compared(verdict, run, reference)


def _lossy(
    model: str | Path,
    case: _Case,
    lossy: Lossy,
    reference: _Run,
    task: _RunTask,
) -> Iterator[Verdict]:
    """Yield the verdict of a lossy policy, on a model of its own: passes may need more room."""
    options = {**case.options, "policy": lossy.policy, "policy_options": lossy.options}
    plan = plan_model(model, **case.options)
    if not plan.num_experts:
        return
    verdict = replace(_verdict(case, plan, lossy.policy), is_lossless=False)
    try:
        with LLM(model, **options) as llm:
            verdict = replace(_verdict(case, llm.plan, lossy.policy), is_lossless=False)
            yield _compared(verdict, _run(llm, task), reference)
    except PlanError as error:
        yield replace(verdict, reason=in_words(str(error), FLAGS))


def _verdict(case: _Case, plan: MemoryPlan, policy: str) -> Verdict:
    """Return the verdict of a run, before comparison."""
    return Verdict(
        device=case.device,
        policy=policy,
        budget_bytes=plan.budget_bytes,
        host_budget_bytes=plan.host.budget_bytes,
        num_residents=sum(plan.residents_per_layer),
        tolerance=case.tolerance,
        formats=plan.formats,
    )


def _run(llm: LLM, task: _RunTask) -> _Run:
    before, layers = llm.stats(), _Layers()
    with llm.observed(layers):
        logits = _some_rows(llm.logits(task.text))
    [completion] = llm.generate([list(task.prompt)], task.params)
    token_ids, chunks = completion.token_ids, dict[str, int]()
    if not llm.config.decoding.keeps_keys and is_long(len(task.text)):
        token_ids = [*token_ids, *_long_step(llm, task.text)]
        chunks = {} if llm.current_pass is None else dict(llm.current_pass.chunks)
    after = llm.stats()
    num_hits, num_misses = (after[name] - before[name] for name in ("num_hits", "num_misses"))
    share = hit_rate(num_hits, num_hits + num_misses)
    return _Run(layers.seen, logits, len(task.text), token_ids, share, chunks)


def _some_rows(logits: Tensor) -> Tensor:
    """Copy at most `MAX_LOGIT_ROWS` rows, evenly spaced.

    Two runs are kept beside a model that may fill the memory, and the logits of 800 tokens take 0.4
    GB.
    """
    num_rows = len(logits)
    rows = torch.linspace(0, num_rows - 1, min(num_rows, MAX_LOGIT_ROWS)).long()
    return logits[rows]


def _long_step(llm: LLM, text: Sequence[int]) -> list[int]:
    """Return the tokens that one step writes in place of a text's end."""
    num_new = min(LONG_ANSWER_TOKENS, len(text) - 1)
    diffusion = DiffusionParams(steps=1, block_length=num_new, remasking="low_confidence")
    params = SamplingParams(max_tokens=num_new, ignore_eos=True, diffusion=diffusion)
    [completion] = llm.generate([list(text[: len(text) - num_new])], params)
    return completion.token_ids


def _experts_of(llm: LLM, seen: _LayerCopy) -> Tensor:
    """Compute a layer's experts, a pass' rows at a time."""
    parts = zip(*(torch.split(t, MAX_PASS_ROWS) for t in (seen.x, *seen.routing)), strict=True)
    outs = [
        llm.run_experts(seen.layer, x, Routing(experts, weights), seen.step)
        for x, experts, weights in parts
    ]
    return torch.cat(outs)


class _Layers:
    """Observer that copies every MoE layer's input and output."""

    def __init__(self) -> None:
        self.seen: list[_LayerCopy] = []

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        x, experts, weights, out = (t.to("cpu", copy=True) for t in (x, *routing, out))
        self.seen.append(_LayerCopy(layer, step, x, Routing(experts, weights), out))


def _compared(verdict: Verdict, run: _Run, reference: _Run) -> Verdict:
    pairs = zip(run.layers, reference.layers, strict=True)
    divided = {op: n for op, n in run.chunks.items() if n > reference.chunks.get(op, 1)}
    differences = [relative_difference(one.out, other.out) for one, other in pairs]
    return replace(
        verdict,
        hit_rate=run.hit_rate,
        largest_layer_difference=max(differences, default=0.0),
        first_layer=_first(difference > verdict.tolerance for difference in differences),
        largest_logit_difference=relative_difference(run.logits, reference.logits),
        first_token=_first(a != b for a, b in zip_longest(run.token_ids, reference.token_ids)),
        num_equal_tokens=sum(map(eq, run.token_ids, reference.token_ids)),
        num_tokens=len(reference.token_ids),
        num_long_tokens=run.num_text if is_long(run.num_text) else 0,
        divided=divided,
    )


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference as a share of the largest value; infinite if one is NaN."""
    if torch.equal(found, wanted):
        return 0.0
    largest = float((found - wanted).abs().nan_to_num(torch.inf).max())
    scale = float(wanted.abs().nan_to_num(0.0).max())
    return largest / scale if scale else torch.inf


def _first(flags: Iterator[bool]) -> int | None:
    return next((i for i, flag in enumerate(flags) if flag), None)
