"""Routing traces that the simulated benchmarks replay: recorded runs, and synthetic ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from common.models import cache_folder, model_folder
from common.record import say
from common.texts import text_for, token_ids
from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.core import MoEShape
from lowtide.errors import UsageError
from lowtide.model_folder.hub import resolve_model
from lowtide.record import recorded
from lowtide.replay.trace import TRACE_VERSION, Trace

_SYNTH = {"synth:llada2": "llada2", "synth:qwen3_moe": "qwen3_moe"}
_PROMPT_CHARACTERS, _PROMPT_TOKENS = 400, 64


class Run(NamedTuple):
    """A run to record: `model`, as `LLM` takes it, or `synth:FAMILY` for its small size.

    num_rounds follow each other, in each of which num_requests are answered at once, every one
    to another prompt; `for_calibration` takes other prompts again.
    """

    model: str
    num_requests: int = 1
    num_rounds: int = 4
    new_tokens: int = 64
    block_length: int | None = None
    threshold: float | None = None
    for_calibration: bool = False

    @property
    def name(self) -> str:
        """Name of the trace's file, and of the run in results."""
        parts = [self.model.replace(":", "-"), f"n{self.num_requests}", f"r{self.num_rounds}"]
        parts += [f"t{self.new_tokens}"]
        parts += [f"b{self.block_length}"] if self.block_length else []
        parts += [f"p{self.threshold:g}"] if self.threshold else []
        return "-".join([*parts, *(["calibration"] if self.for_calibration else [])])


class Recorded(NamedTuple):
    """A recorded run, replayed with experts of `sizes_of`."""

    run: Run
    sizes_of: str


RECORDED = (
    Recorded(Run("demo:diffusion", 1, 6, 64), "llada2"),
    Recorded(Run("synth:llada2", 1, 3, 96), "llada2"),
    Recorded(Run("demo:chat", 1, 4, 64), "qwen3_moe"),
    Recorded(Run("demo:chat", 8, 2, 48), "qwen3_moe"),
    Recorded(Run("synth:qwen3_moe", 1, 4, 32), "qwen3_moe"),
    Recorded(Run("synth:qwen3_moe", 8, 2, 32), "qwen3_moe"),
)


def record_with_known(recorded: Sequence[Recorded]) -> list[tuple[Recorded, Trace, Trace]]:
    """Each with its trace, and one of other prompts to calibrate on."""
    runs = [one.run for one in recorded]
    traces = record_all([*runs, *(run._replace(for_calibration=True) for run in runs)])
    return list(zip(recorded, traces[: len(runs)], traces[len(runs) :], strict=True))


def record_all(runs: list[Run]) -> list[Trace]:
    """The traces of `runs`, recorded in the user's cache where they are not there already.

    One model is loaded at a time, once for all of its runs.
    """
    folder = cache_folder() / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(run.model for run in runs):
        missing = [r for r in runs if r.model == model and not trace_path(folder, r).exists()]
        if missing:
            _record(missing, folder)
    return [Trace.load(trace_path(folder, run)) for run in runs]


def moe_shape(trace: Trace) -> MoEShape:
    """Return the shape that the trace's own experts' costs are computed from."""
    return MoEShape(*trace.shape)


def _record(runs: list[Run], folder: Path) -> None:
    with LLM(_model(runs[0].model), context=4096, cache="off") as llm:
        for run in runs:
            say(f"Recording {run.name} ...")
            diffusion = DiffusionParams(
                block_length=run.block_length, threshold=run.threshold, eos_early_stop=False
            )
            in_order = llm.config.decoding.writes_in_order
            params = SamplingParams(
                max_tokens=run.new_tokens,
                ignore_eos=True,
                diffusion=DiffusionParams() if in_order else diffusion,
            )
            with recorded(llm, trace_path(folder, run), run.model):
                for prompts in _prompts(llm, run):
                    llm.generate(prompts, params)


def _model(name: str) -> str | Path:
    if not name.startswith("synth:"):
        return name
    if name not in _SYNTH:
        raise UsageError(f"{name} cannot be recorded; choose {', '.join(_SYNTH)}.")
    return model_folder(None, "small", _SYNTH[name])


def _prompts(llm: LLM, run: Run) -> list[list[list[int]]]:
    """Return each round's prompts: pieces of one half of a text, each from another place.

    A calibration's are from the other half.
    """
    text = text_for(run.model)
    half = len(text) // 2
    text = text[half:] if run.for_calibration else text[:half]
    stride = (len(text) - _PROMPT_CHARACTERS) // (run.num_rounds * run.num_requests)
    pieces = [
        text[i * stride :][:_PROMPT_CHARACTERS] for i in range(run.num_rounds * run.num_requests)
    ]
    ids = [token_ids(llm, piece)[:_PROMPT_TOKENS] for piece in pieces]
    return [ids[start :: run.num_rounds] for start in range(run.num_rounds)]


def trace_path(folder: Path, run: Run) -> Path:
    """Return a trace's path, which depends on the weights: demos are trained again at times."""
    of = "" if run.model in _SYNTH else f"-{_digest(resolve_model(run.model))}"
    return folder / f"{run.name}{of}-v{TRACE_VERSION}.npz"


@cache
def _digest(model: Path) -> str:
    weights = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        weights.update(path.read_bytes())
    return weights.hexdigest()[:8]
