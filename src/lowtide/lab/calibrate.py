"""`lowtide calibrate`: records a model's routing on a text, and how well it can be predicted.

Pieces of the text are prompts of short answers. An autoregressive model reads each in one pass and
then writes token by token; a diffusion model denoises blocks after it. So routing from step to step
is realistic. The first three quarters of the pieces calibrate; the others test the predictions.
Prompts run one at a time and are answered greedily, so equal texts give equal calibrations.
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import FloatArray, IntArray, Step
from lowtide.errors import UsageError
from lowtide.experts.rows import Routing
from lowtide.experts.runtime import ExpertObserver, Observer
from lowtide.lab.buddies import AS_COUNTED, CoActivations, ProfileChoices, needed_tokens
from lowtide.lab.gate_inputs import EarlyGates, ResidualMean
from lowtide.lab.input_squares import InputSquares
from lowtide.lab.simulation.simulator import calibrate as count_activations
from lowtide.llm import LLM
from lowtide.model_folder.tokenizer import NO_TOKENIZER
from lowtide.params import SamplingParams
from lowtide.policies.prefetch import Gate
from lowtide.progress import Progress, no_progress
from lowtide.record import Recorder
from lowtide.replay.calibration import TOP_SIZES, Calibration, GateAccuracy
from lowtide.replay.trace import Trace, TraceShape

NUM_PIECES = 16
TEST_SHARE = 0.25
MIN_PIECE_TOKENS = 8


class Length(NamedTuple):
    """The length of one piece of the text."""

    prompt_tokens: int
    new_tokens: int


AUTOREGRESSIVE = Length(256, 16)
DIFFUSION = Length(64, 64)  # most of its rows are of blocks being filled, as in use


@dataclass(frozen=True, slots=True)
class GateRecord:
    """Predictions of early gates during a run, and the demand that followed."""

    trace: Trace
    predicted: dict[Gate, list[IntArray]]  # tokens per expert of each pass [layers, experts]
    accuracy: GateAccuracy


def calibrate(
    llm: LLM,
    text: str | Sequence[int],
    model: str,
    *,
    num_pieces: int = NUM_PIECES,
    buddies: bool = False,
    choices: ProfileChoices = AS_COUNTED,
    inputs: bool = False,
    progress: Progress = no_progress,
) -> Calibration:
    """Calibrate `llm` on a text or on token ids.

    model: the trace's model name. buddies: also make a buddy profile, by `choices`. inputs: also
    record experts' inputs, which needs a model without a device. Raises UsageError for a text
    that is too short or a model without a tokenizer, UnsupportedError for a model without experts,
    and as `LLM.generate` does.
    """
    llm.config.check_experts("A calibration is of experts")
    token_ids, shape = _token_ids(llm, text), TraceShape(*llm.config.moe_shape)
    seen = CoActivations(shape, choices) if buddies else None
    if seen is not None:  # checked first: a text long enough for buddies is so for everything
        check_length(shape, len(token_ids), num_pieces, _length(llm))
    learning, testing = split(llm, token_ids, num_pieces)
    squares = InputSquares(shape) if inputs else None
    beside = () if seen is None else (seen,)
    trace, residual = learn(llm, learning, model, progress, beside, squares)
    accuracy = foresee(llm, testing, model, residual, progress).accuracy
    frequency, following = count_activations(trace)
    return Calibration(
        architecture=llm.config.architecture,
        text_sha256=_digest(text),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        trace=trace,
        residual=residual,
        frequency=frequency,
        following=following,
        accuracy=accuracy,
        buddies=None if seen is None else seen.profile(llm.fingerprint),
        inputs=None if squares is None else squares.inputs(llm.fingerprint),
    )


def split(
    llm: LLM, text: str | Sequence[int], num_pieces: int = NUM_PIECES
) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts to calibrate on, and later ones for the test, evenly spaced in the text."""
    token_ids = _token_ids(llm, text)
    if num_pieces < 2 or len(token_ids) < MIN_PIECE_TOKENS * num_pieces:
        raise UsageError(
            f"A text of {len(token_ids)} tokens cannot be divided into {num_pieces} pieces: "
            f"calibrate takes at least 2, of {MIN_PIECE_TOKENS} tokens or more; change --pieces, "
            "or give a longer text."
        )
    stride = len(token_ids) // num_pieces
    length = min(stride, _length(llm).prompt_tokens)
    pieces = [token_ids[i * stride :][:length] for i in range(num_pieces)]
    first_test = num_learning(num_pieces)
    return pieces[:first_test], pieces[first_test:]


def num_learning(num_pieces: int) -> int:
    """Return the number of pieces to calibrate on; the rest are for the test."""
    return num_pieces - max(1, round(TEST_SHARE * num_pieces))


def learn(
    llm: LLM,
    prompts: Sequence[list[int]],
    model: str,
    progress: Progress = no_progress,
    beside: Sequence[Observer] = (),
    experts: ExpertObserver | None = None,
) -> tuple[Trace, NDArray[np.float32]]:
    """Record the routing of prompts and answers, and residual vectors [layers - 1, hidden].

    beside, experts: further observers. A residual vector is the mean over all rows of the next MoE
    layer's gate input less this one's, both after their norms (DALI, Eq. 10).
    """
    mean = ResidualMean(*llm.config.moe_shape[:1], llm.config.hidden_size)
    observers = (mean, *beside)
    trace = _run(llm, prompts, model, observers, "calibrating", progress, experts)
    return trace, mean.vectors()


def foresee(
    llm: LLM,
    prompts: Sequence[list[int]],
    model: str,
    residual: NDArray[np.float32],
    progress: Progress = no_progress,
) -> GateRecord:
    """Run every layer's gate one layer early during the prompts and their answers."""
    gates = EarlyGates(llm, residual)
    trace = _run(llm, prompts, model, (gates,), "testing", progress)
    return GateRecord(trace, gates.predicted, _accuracy(trace, gates))


def top_share(score: IntArray | FloatArray, hits: IntArray, num_top: int) -> float:
    """Return the share of the `num_top` best scored experts that is among those with most hits.

    Experts with as many hits as the last of those count, too; if fewer were activated, these are
    all. Of equal scores the lower id is taken. score, hits [experts]; hits are not all 0.
    """
    num_top = min(num_top, len(hits))
    chosen = np.argsort(-score, kind="stable")[:num_top]
    chosen = chosen[score[chosen] > 0]
    least = max(1, int(np.sort(hits)[-num_top]))
    return int((hits[chosen] >= least).sum()) / min(num_top, int((hits > 0).sum()))


class _Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        for observer in self._observers:
            observer.saw_layer(layer, step, x, routing, out)


def _run(
    llm: LLM,
    prompts: Sequence[list[int]],
    model: str,
    observers: Sequence[Observer],
    what: str,
    progress: Progress,
    experts: ExpertObserver | None = None,
) -> Trace:
    """Answer the prompts one by one, watched by `observers`; return the trace."""
    recorder = Recorder(llm, model)
    params = SamplingParams(max_tokens=_length(llm).new_tokens, ignore_eos=True, temperature=0.0)
    with llm.observed(_Observers((recorder, *observers)), experts):
        for index, prompt in enumerate(prompts):
            llm.generate([prompt], params)
            progress(what, index + 1, len(prompts))
    recorder.finish()
    return recorder.writer.trace()


def _accuracy(trace: Trace, gates: EarlyGates) -> GateAccuracy:
    hits = trace.hits()[:, 1:]  # [passes, layers - 1, experts]
    top = np.zeros((*gates.routed.shape, len(TOP_SIZES)))
    for gate, passes in enumerate(gates.predicted.values()):
        for scores, asked in zip(passes, hits, strict=True):
            for layer, size in np.ndindex(top.shape[1:]):
                share = top_share(scores[layer + 1], asked[layer], TOP_SIZES[size])
                top[gate, layer, size] += share / len(hits)
    return GateAccuracy(gates.routed, top.clip(max=1.0), gates.cosine)


def _length(llm: LLM) -> Length:
    """Return the lengths of a piece and its answer, shorter in a short context."""
    usual = AUTOREGRESSIVE if llm.config.decoding.writes_in_order else DIFFUSION
    room = min(llm.plan.context, llm.config.max_positions)
    block_length = llm.config.decoding.block_length
    new_tokens = max(block_length, min(usual.new_tokens, room // 2) // block_length * block_length)
    # A prompt may share its last block with the answer, which then takes one block more.
    return Length(
        max(1, min(usual.prompt_tokens, room - new_tokens - block_length + 1)), new_tokens
    )


def check_length(shape: TraceShape, num_tokens: int, num_pieces: int, length: Length) -> None:
    """Check that a text of `num_tokens` is long enough for buddies, which need the longest text.

    Raises UsageError with the length that would do.
    """
    needed, stride = needed_tokens(shape), num_tokens // max(1, num_pieces)
    most, learning = sum(length), max(0, num_learning(num_pieces))
    found = 0
    if stride >= MIN_PIECE_TOKENS:
        found = learning * (min(stride, length.prompt_tokens) + length.new_tokens)
    if found >= needed:
        return
    pieces = max(2, num_pieces)
    while num_learning(pieces) * most < needed:
        pieces += 1
    least = math.ceil(needed / num_learning(pieces)) - length.new_tokens
    raise UsageError(
        f"Buddies of {shape.num_experts} experts, {shape.num_experts_per_token} per token, take at "
        f"least {needed} tokens of text and answers to learn from, and this text of {num_tokens} "
        f"has {found} in {learning} of {num_pieces} pieces; give "
        f"{pieces * max(MIN_PIECE_TOKENS, least)} tokens or more in --pieces {pieces}."
    )


def _digest(text: str | Sequence[int]) -> str:
    data = text.encode() if isinstance(text, str) else np.asarray(text, np.int64).tobytes()
    return hashlib.sha256(data).hexdigest()


def _token_ids(llm: LLM, text: str | Sequence[int]) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    if llm.tokenizer is None:
        raise UsageError(f"{NO_TOKENIZER}: it can be calibrated on ids only.")
    return list(llm.tokenizer.encode(text))
