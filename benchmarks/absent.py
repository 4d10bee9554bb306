"""Cost of an absent expert: passes with a share of the experts resident, beside all of them.

Lanes take turns, answer by answer: everything resident, then each share under each policy. Before
every round two threads read whole experts straight into slots, the least that absent ones take. A
lane's bound is the resident lane's pass and, after it, its absent experts' bytes at that rate; its
processor time stands beside the resident lane's and those reads'. Nothing overlaps in the bound, so
that a pass may take less. Five parts:

- tmpfs: decoding `synth qwen3_moe --size small`, its file in memory: a disk without limit;
- block: a diffusion block's passes of `synth llada2 --size small`, the same way;
- gguf: the first model in Q4_0, the same way;
- disk: six layers of Qwen3-30B-A3B's dimensions, past the page cache;
- by_expert: the same in Q4_0, as llama.cpp writes it and with `lowtide pack --by-expert`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common.arguments import add_model, add_parts, make_parser, run_script
from common.ceilings import SlotReads, memory_ceiling
from common.cut_models import model_of_layers
from common.gguf_file import write_gguf
from common.models import model_folder
from common.record import Recorder, say
from common.run import loaded_engine, make_request

from lowtide.config import ModelConfig
from lowtide.decode.request import Committed, Draft, Request
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.running.decoding import make_decoder
from lowtide.engine.running.engine import Engine
from lowtide.errors import UsageError
from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model
from lowtide.model_writing.pack_experts import pack_experts
from lowtide.params import SamplingParams
from lowtide.reading.by_expert import copy_path

PARTS = ("tmpfs", "block", "gguf", "disk", "by_expert")
POLICIES = ("lru", "lowtide")
SHARES = {"tmpfs": (0.9, 0.75, 0.5, 0.25)}  # of the experts resident; others: one half
NUM_DISK_LAYERS = 6
TMPFS = Path("/dev/shm")
READ_BYTES = 1 << 30  # before each round, by two threads


def main() -> None:
    options = _options()
    settings = {
        "num_prompt": options.prompt,
        "num_new": options.new,
        "repeats": options.repeats,
    }
    recorder = Recorder("absent", settings, options.out)
    recorder.write("ceiling", memory_ceiling())
    for part in options.parts:
        with _models(part, options) as models:
            if not models:
                say(f"{part} is left out: gguf is not installed.")
                recorder.write(part, {"not_installed": ["gguf"]})
                continue
            for row in _measured(models, SHARES.get(part, (0.5,)), options):
                recorder.write(part, row)


class Pass(NamedTuple):
    """Times and counts of one pass of an answer."""

    s: float
    cpu_s: float  # of all threads
    engine_s: float  # processor time of the thread that runs the model
    num_absent: float  # experts that were asked for and not resident
    read_bytes: float


class Lane:
    """An engine with a share of the experts resident, driven by this thread."""

    def __init__(
        self, stack: ExitStack, model: Path, policy: str, share: float, options: argparse.Namespace
    ) -> None:
        context = options.prompt + options.new + 64
        plan = plan_model(model, context=context)
        config = EngineConfig(
            context=context, policy=policy, host_memory=budget_of_share(plan, share)
        )
        self.name, self.policy, self.share = str(model.relative_to(model.parents[1])), policy, share
        self._options = options
        self._engine: Engine = stack.enter_context(loaded_engine(str(model), config))
        self.num_layers = len(self._engine.plan.residents_per_layer)
        self.expert_bytes = self._engine.facts.weight_map.experts.largest_expert_bytes

    def answer(self, seed: int) -> Pass:
        """The passes of an answer after its first token, or first draft of a block."""
        engine, num_passes = self._engine, 0
        with engine.executor.in_charge(), closing(make_decoder(engine)) as decoder:
            decoder.add(_request(engine.model.config, self._options, seed))
            while not any(isinstance(event, Committed | Draft) for event in decoder.step()):
                pass
            before = self._state()
            while decoder.has_work:
                decoder.step()
                num_passes += 1
            spent = zip(self._state(), before, strict=True)
        return Pass(*((after - start) / num_passes for after, start in spent))

    def _state(self) -> Pass:
        counts = self._engine.experts.as_dict()
        return Pass(
            time.perf_counter(),
            time.process_time(),
            time.thread_time(),
            counts["num_misses"],
            counts["read_bytes"],
        )


def _request(config: ModelConfig, options: argparse.Namespace, seed: int) -> Request:
    if not config.decoding.writes_in_order:
        return make_request(config, options.prompt, options.new, seed)
    ordinary = min((config.vocab_size, *config.eos_token_ids))
    prompt = np.random.default_rng(seed).integers(0, ordinary, options.prompt).tolist()
    params = SamplingParams(max_tokens=options.new, ignore_eos=True)
    return Request(id=0, prompt=prompt, params=params)


def _measured(
    models: Sequence[Path], shares: Sequence[float], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each lane; the first has everything resident. models: the same weights."""
    wanted = [(models[0], "resident", 1.0), *itertools.product(models, POLICIES, shares)]
    files = models[:1] if models[0].is_file() else sorted(models[0].glob("*.safetensors"))
    with ExitStack() as stack:
        lanes = [Lane(stack, *each, options) for each in wanted]
        reads = stack.enter_context(closing(SlotReads(files, lanes[0].expert_bytes)))
        passes: list[list[Pass]] = [[] for _ in lanes]
        read_s: list[tuple[float, float]] = []
        for lane in lanes:
            lane.answer(seed=0)
        for number in range(options.repeats):
            read_s.append(reads.measure(READ_BYTES, seed=number))
            for lane, done in zip(lanes, passes, strict=True):
                done.append(lane.answer(seed=number + 1))
            say(f"{number + 1} of {options.repeats} rounds")
        for lane, done in zip(lanes, passes, strict=True):
            row = {"model": lane.name, **_row(lane, done, passes[0], read_s)}
            say(_line(row))
            yield row


def _row(
    lane: Lane,
    passes: Sequence[Pass],
    resident: Sequence[Pass],
    read_s: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    """Medians and ranges over the rounds, each beside what was measured in the same one."""
    rounds = list(zip(passes, resident, read_s, strict=True))
    absent_bytes = [one.num_absent * lane.expert_bytes for one in passes]
    bounds = [
        (all_here.s + num_bytes * byte_s, all_here.cpu_s + num_bytes * byte_cpu_s)
        for (_, all_here, (byte_s, byte_cpu_s)), num_bytes in zip(rounds, absent_bytes, strict=True)
    ]
    return {
        "policy": lane.policy,
        "share": lane.share,
        **_median("pass_ms", [1e3 * one.s for one in passes]),
        "absent_per_pass": statistics.median(one.num_absent for one in passes),
        "read_MB_per_pass": statistics.median(one.read_bytes / 1e6 for one in passes),
        **_median("over_bound", [one.s / s for one, (s, _) in zip(passes, bounds, strict=True)]),
        **_median(
            "cpu_over_bound",
            [one.cpu_s / cpu_s for one, (_, cpu_s) in zip(passes, bounds, strict=True)],
        ),
        **_median(
            "engine_excess_us_per_layer",
            [1e6 * (one.engine_s - here.engine_s) / lane.num_layers for one, here, _ in rounds],
        ),
        "cpu_ms": statistics.median(1e3 * one.cpu_s for one in passes),
        "engine_ms": statistics.median(1e3 * one.engine_s for one in passes),
        "expert_bytes": lane.expert_bytes,
        **_median("two_readers_GBps", [1e-9 / byte_s for byte_s, _ in read_s]),
    }


def _median(name: str, values: Sequence[float]) -> dict[str, Any]:
    spread = [float(f"{value:.5g}") for value in (min(values), max(values))]
    return {name: statistics.median(values), f"{name}_range": spread}


def _line(row: Mapping[str, Any]) -> str:
    def told(name: str, form: str) -> str:
        least, most = row[f"{name}_range"]
        return f"{row[name]:{form}} ({least:{form}} to {most:{form}})"

    return (
        f"{row['model']} {row['share']:4.0%} {row['policy']:8} {told('pass_ms', '6.2f')} ms a pass,"
        f" {row['absent_per_pass']:5.1f} absent, {row['read_MB_per_pass']:6.1f} MB read,"
        f" {told('over_bound', '.2f')} of the bound,"
        f" processor {told('cpu_over_bound', '.2f')},"
        f" engine's thread {told('engine_excess_us_per_layer', '.0f')} us a layer more"
    )


@contextmanager
def _models(part: str, options: argparse.Namespace) -> Iterator[list[Path]]:
    """Yield a part's models.

    They are on tmpfs unless the part is of the disk; none where they cannot be written.
    """
    if part in ("gguf", "by_expert") and find_spec("gguf") is None:
        yield []
        return
    if part in ("disk", "by_expert"):
        model = model_of_layers("qwen3_moe", NUM_DISK_LAYERS)
        yield [model] if part == "disk" else _by_expert(model)
        return
    if part == "block":
        folder = model_folder(None, "small", "llada2")
    else:
        folder = model_folder(options.model, "small", "qwen3_moe")
    with tempfile.TemporaryDirectory(dir=_tmpfs(folder), prefix="lowtide-absent-") as name:
        target = Path(name) / folder.name
        if part == "gguf":
            yield [write_gguf(folder, target / f"{folder.name}-Q4_0.gguf", is_quantised=True)]
        else:
            yield [Path(shutil.copytree(folder, target))]


def _by_expert(model: Path) -> list[Path]:
    """A file in Q4_0, and itself with a copy of its experts beside it."""
    plain = write_gguf(model, model.parent / "gguf" / f"{model.name}-Q4_0.gguf", is_quantised=True)
    packed = plain.parents[1] / "by-expert" / plain.name
    packed.parent.mkdir(exist_ok=True)
    if not packed.exists():
        os.link(plain, packed)
    if not copy_path(packed).exists():
        pack_experts(packed)
    return [plain, packed]


def _tmpfs(folder: Path) -> Path:
    wanted = sum(path.stat().st_size for path in folder.iterdir())
    if not TMPFS.is_dir() or shutil.disk_usage(TMPFS).free < wanted:
        raise UsageError(f"{TMPFS} is no tmpfs with {wanted} bytes free; take --parts disk.")
    return TMPFS


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_model(parser, "small", "qwen3_moe")
    add_parts(parser, PARTS)
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--new", type=int, default=96, help="new tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, for medians")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
