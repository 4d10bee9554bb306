"""Decoding with the exact KV cache of finished blocks against recomputing everything.

Both run on one engine with every expert in memory, denoising pass by denoising pass in turn, so
that they share whatever else the machine is doing. Committed tokens per second, at each answer
length of one generation.
"""

from __future__ import annotations

import argparse
import statistics
import time

from common.arguments import add_model, make_parser, run_script
from common.ceilings import memory_ceiling
from common.memory import peak_resident_bytes
from common.models import model_folder
from common.record import Recorder, say
from common.run import decode, engine_decoder, loaded_engine, make_request

from lowtide.decode.request import Committed, Draft, Request
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.running.engine import Engine


class Lane:
    """One generation, advanced a denoising pass at a time, and the seconds it has taken."""

    def __init__(self, engine: Engine, use_kv_cache: bool, request: Request) -> None:
        self._decoder = engine_decoder(engine, use_kv_cache)
        self._decoder.add(request)
        self.token_ids: list[int] = []  # committed
        self.num_forwards = 0  # long inputs take several for one denoising pass
        self.seconds = 0.0

    @property
    def has_work(self) -> bool:
        return self._decoder.has_work

    def denoise(self) -> None:
        """One denoising pass and those that must come before it."""
        start_s = time.perf_counter()
        is_denoised = False
        while not is_denoised:
            for event in self._decoder.step():
                is_denoised |= isinstance(event, Draft)
                if isinstance(event, Committed):
                    self.token_ids += event.tokens
            self.num_forwards += 1
        self.seconds += time.perf_counter() - start_s

    def speed(self) -> float:
        """Committed tokens per second so far."""
        return len(self.token_ids) / self.seconds


def main() -> None:
    options = _options()
    folder = model_folder(options.model, "small")
    settings = {"model": folder.name, "num_prompt": options.prompt, "repeats": options.repeats}
    recorder = Recorder("decode", settings, options.out)
    recorder.write("ceiling", memory_ceiling())
    canvas = options.prompt + max(options.new) + 32  # in whole blocks
    config = EngineConfig(context=2 * canvas, policy="resident")
    with loaded_engine(str(folder), config) as engine, engine.executor.in_charge():
        warm_up = make_request(engine.model.config, options.prompt, 32, seed=1)
        for use_kv_cache in (True, False):
            decode(engine_decoder(engine, use_kv_cache), warm_up)
        repeats = [_race(engine, options) for _ in range(options.repeats)]
    for num_new in sorted(options.new):
        recorder.write("decode", _row(num_new, [rows[num_new] for rows in repeats]))


def _race(engine: Engine, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """One generation both ways; what each had taken at every answer length asked for."""
    request = make_request(engine.model.config, options.prompt, max(options.new), seed=0)
    cached, recomputed = Lane(engine, True, request), Lane(engine, False, request)
    wanted, rows = sorted(options.new), {}
    while cached.has_work or recomputed.has_work:
        for lane in (cached, recomputed):
            if lane.has_work:
                lane.denoise()
        if wanted and len(cached.token_ids) >= wanted[0] <= len(recomputed.token_ids):
            rows[wanted.pop(0)] = _state(cached, recomputed)
            say(f"{len(cached.token_ids)} tokens: {cached.seconds:.1f}, {recomputed.seconds:.1f} s")
    return rows


def _state(cached: Lane, recomputed: Lane) -> dict[str, float]:
    return {
        "num_committed": len(cached.token_ids),
        "cached_tokens_per_s": cached.speed(),
        "recompute_tokens_per_s": recomputed.speed(),
        "ratio": cached.speed() / recomputed.speed(),
        "same_tokens": cached.token_ids == recomputed.token_ids,
        "cached_forwards": cached.num_forwards,
        "recompute_forwards": recomputed.num_forwards,
        "cached_s": cached.seconds,
        "recompute_s": recomputed.seconds,
    }


SPEEDS = ("cached_tokens_per_s", "recompute_tokens_per_s")


def _row(num_new: int, states: list[dict[str, float]]) -> dict[str, object]:
    """Medians over the repeats."""
    medians = {name: statistics.median(state[name] for state in states) for name in states[0]}
    is_same = all(state["same_tokens"] for state in states)
    return {
        "num_new": num_new,
        **medians,
        **{f"each_{name}": [state[name] for state in states] for name in SPEEDS},
        "same_tokens": is_same,
        "peak_resident_bytes": peak_resident_bytes(),
    }


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "small")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument(
        "--new",
        type=int,
        nargs="+",
        default=[256, 512],
        help="answer lengths in tokens",
    )
    parser.add_argument("--repeats", type=int, default=3, help="whole runs, for medians")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
