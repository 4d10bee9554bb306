"""A pass over one diffusion block at real sizes, beside the time that its bytes take.

LLaDA2.0-mini's dimensions, five layers, four of them with experts, random weights, all in memory:
passes of 32 rows, 8 of 256 experts each. The same requests go through an engine for each kind of
weights, by turns. The bound is what a pass goes through (experts that were asked for, everything
else but the embedding) over the rate that reading memory was measured at, in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.arguments import add_model, make_parser, run_script
from common.ceilings import memory_ceiling
from common.cut_models import model_of_layers
from common.models import stored_as
from common.record import Recorder, say
from common.run import Decoded, decode, engine_decoder, loaded_engine, make_request

from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.running.engine import Engine

MODEL = "llada2"
NUM_LAYERS = 5


def main() -> None:
    options = _options()
    folder = options.model or model_of_layers(MODEL, NUM_LAYERS)
    settings = {
        "model": folder.name,
        "num_prompt": options.prompt,
        "num_new": options.new,
        "repeats": options.repeats,
    }
    recorder = Recorder("block pass", settings, options.out)
    ceiling = memory_ceiling()
    recorder.write("ceiling", ceiling)
    with ExitStack() as stack:
        lanes = {weights: _Lane(stack, folder, weights, options) for weights in options.weights}
        for number in range(options.repeats):
            for lane in lanes.values():
                lane.answer(seed=number + 1)
            say(f"{number + 1} of {options.repeats} rounds")
        own_s = next(iter(lanes.values())).pass_s
        for weights, lane in lanes.items():
            row = lane.row(1e9 * max(rate for name, rate in ceiling.items() if "_read_" in name))
            recorder.write(
                "block pass", {"weights": weights, **row, "over_first": row["s"] / own_s}
            )


class _Lane:
    """A loaded engine, and the passes that it has run."""

    def __init__(
        self, stack: ExitStack, folder: Path, weights: str, options: argparse.Namespace
    ) -> None:
        stored, activations = stored_as(folder, weights)
        context = options.prompt + options.new + 64
        config = EngineConfig(context=context, policy="resident", activations=activations)
        self._engine: Engine = stack.enter_context(loaded_engine(str(stored), config))
        self._options = options
        self._num_passes = self._num_experts = 0
        self._pass_s: list[float] = []
        self._run(seed=0)  # memory has been touched, kernels have been compiled

    def answer(self, seed: int) -> None:
        """Answers a request; its passes count."""
        before = self._asked()
        decoded = self._run(seed)
        self._num_experts += self._asked() - before
        self._num_passes += decoded.num_forwards
        self._pass_s.append(decoded.seconds / decoded.num_forwards)

    @property
    def pass_s(self) -> float:
        """Of all answers the median."""
        return statistics.median(self._pass_s)

    def row(self, read_Bps: float) -> dict[str, Any]:
        """Return a pass's time and bytes."""
        num_bytes = self._pass_bytes()
        return {
            "s": self.pass_s,
            "each_s": self._pass_s,
            "num_passes": self._num_passes,
            "experts_per_pass": self._num_experts / self._num_passes,
            "bytes_per_pass": num_bytes,
            "bound_s": num_bytes / read_Bps,
            "over_bound": self.pass_s * read_Bps / num_bytes,
        }

    def _run(self, seed: int) -> Decoded:
        engine, options = self._engine, self._options
        request = make_request(engine.model.config, options.prompt, options.new, seed)
        with engine.executor.in_charge():
            return decode(engine_decoder(engine), request)

    def _asked(self) -> int:
        counts = self._engine.experts.as_dict()
        return int(counts["num_hits"] + counts["num_misses"])

    def _pass_bytes(self) -> float:
        """By the prediction's own count, with the experts that were asked for."""
        plan = self._engine.plan
        prediction = plan.prediction
        num_predicted = prediction.asked_share * plan.num_experts
        expert_bytes = plan.host.slot_bytes
        dense_bytes = prediction.memory_bytes - num_predicted * expert_bytes
        return dense_bytes + expert_bytes * self._num_experts / self._num_passes


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "full", MODEL)
    parser.add_argument("--weights", nargs="+", default=["own", "q4", "q4+int8"])
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--new", type=int, default=96, help="new tokens of an answer")
    parser.add_argument("--repeats", type=int, default=7, help="answers of each engine")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
