"""Host and device at once: does a step that both share last as long as the longer share alone?

The emulated device computes on one core while the host's experts sleep for most of their time, as
they would on a processor of their own. The ceiling is the longer of the two alone: a ratio of 1.
Shares are `even`, as many experts on each side, and `balanced`, so that both need the same time,
where a loss shows most. Times are real ones of a machine that is emulated.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common.arguments import run_script
from common.ceilings import memory_ceiling
from common.record import Recorder, say

from lowtide.core import MoEShape
from lowtide.devices.emulated import EmulatedDevice
from lowtide.devices.emulated_speeds import EmulatedSpeeds, emulated_speeds
from lowtide.experts.device import ExpertGroup
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.experts.slots import ExpertSlots
from lowtide.kernels.reference import REFERENCE
from lowtide.memory.arena import Arena
from lowtide.threads.executor import HostExecutor, Work

_SIZES = ((1024, 256), (2048, 512))  # hidden, expert
_EXPERTS_PER_TOKEN = 8


class Step:
    """One layer's experts: the first `num_on_device` in a device's slots, the others at home."""

    def __init__(
        self, shape: MoEShape, num_on_device: int, num_tokens: int, speeds: EmulatedSpeeds
    ) -> None:
        layout = SlotLayout.of(shape, torch.bfloat16)
        self._home = _random_experts(layout, shape.num_experts)
        self.device = EmulatedDevice(
            Arena(num_on_device * layout.num_bytes), layout, num_on_device, speeds
        )
        self._on_device = np.arange(num_on_device)
        self._on_host = np.arange(num_on_device, shape.num_experts)
        for expert in self._on_device.tolist():
            self.device.copy(self._home.image(expert), expert, None)
        self.device.drain()
        # As on the device: an expert costs what it would on one core.
        self._executor = HostExecutor(_EXPERTS_PER_TOKEN, cores_per_expert=1)
        self._rows = _even_rows(shape.num_experts, num_tokens)
        self._inputs = torch.randn(len(self._rows.token_of), shape.hidden_size).bfloat16()
        gate, up = (
            torch.empty(len(self._inputs), shape.expert_size, dtype=torch.bfloat16)
            for _ in range(2)
        )
        self._buffers = ExpertBuffers(self._inputs.clone(), gate, up)

    def seconds(self, with_device: bool, with_host: bool) -> float:
        """Runs the shares asked for, both at once."""
        self._buffers.parts.copy_(self._inputs)  # outputs have replaced them
        start_s = time.perf_counter()
        on_host = self._on_host.tolist() if with_host else []
        futures = [self._executor.submit(self._host_work(expert)) for expert in on_host]
        if with_device:
            group = ExpertGroup(0, self._on_device, self._on_device)
            self.device.run(group, self._rows, self._buffers, None)
            self.device.join()
        for future in futures:
            future.result()
        return time.perf_counter() - start_s

    def emulated_host_s(self) -> float:
        """What the host's share takes by the speeds, without the waking up of threads."""
        counts = np.diff(self._rows.bounds)[self._on_host]
        return sum(map(self.device.speeds.host_s, counts.tolist()))

    def close(self) -> None:
        self._executor.close()
        self.device.close()

    def _host_work(self, expert: int) -> Work:
        pairs = self._rows.pairs(expert)
        parts, gate, up = (buffer[pairs] for buffer in self._buffers[:3])
        weights = self._home.weights(0, expert)
        work = partial(REFERENCE.gated_mlp, parts, weights, gate, up, parts)
        return self.device.host_work([pairs.stop - pairs.start], work)


def main() -> None:
    options = _options()
    settings = {
        "device": "emulated",
        "dtype": "bfloat16",
        "num_tokens": options.tokens,
        "experts_per_token": _EXPERTS_PER_TOKEN,
        "num_on_device": options.experts,
        "repeats": options.repeats,
    }
    torch.set_num_threads(1)  # all products here are on threads of the device or the executor
    recorder = Recorder("overlap", settings, options.out)
    recorder.write("ceiling", memory_ceiling())
    for hidden, width in _SIZES:
        shape = MoEShape(1, options.experts, _EXPERTS_PER_TOKEN, hidden, width)
        layout = SlotLayout.of(shape, torch.bfloat16)
        speeds = emulated_speeds({}, layout, shape, torch.bfloat16)
        say(speeds.describe())
        balance = _measure(recorder, "even", options.experts, shape, speeds, options)
        _measure(recorder, "balanced", balance, shape, speeds, options)


def _measure(
    recorder: Recorder,
    share: str,
    num_on_host: int,
    shape: MoEShape,
    speeds: EmulatedSpeeds,
    options: argparse.Namespace,
) -> int:
    """Records one share; returns how many host experts would take as long as the device's."""
    shape = shape._replace(num_experts=options.experts + num_on_host)
    sides = ((True, False), (False, True), (True, True))
    with closing(Step(shape, options.experts, options.tokens, speeds)) as step:
        # The first round warms.
        rounds = [[step.seconds(*side) for side in sides] for _ in range(1 + options.repeats)]
        emulated_s = step.emulated_host_s()
    device_s, host_s, both_s = zip(*rounds[1:], strict=True)
    ceiling_s = max(statistics.median(device_s), statistics.median(host_s))
    ratio = statistics.median(both_s) / ceiling_s
    values = {
        "hidden_size": shape.hidden_size,
        "expert_size": shape.expert_size,
        "share": share,
        "num_on_host": num_on_host,
        "ratio": ratio,
        "ceiling_ms": 1e3 * ceiling_s,
        "together_ms": _milliseconds(both_s),
        "device_alone_ms": _milliseconds(device_s),
        "host_alone_ms": _milliseconds(host_s),
        "host_emulated_ms": 1e3 * emulated_s,
        "speeds": speeds.describe(),
    }
    recorder.write("overlap", values)
    say(
        f"{shape.hidden_size}x{shape.expert_size}, {share}: together {ratio:.3f}x the longer "
        f"share alone ({1e3 * ceiling_s:.1f} ms, emulated)"
    )
    return max(1, round(num_on_host * statistics.median(device_s) / statistics.median(host_s)))


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    names = ("median", "least", "most")
    return {name: round(1e3 * s, 2) for name, s in zip(names, (median, least, most), strict=True)}


def _even_rows(num_experts: int, num_tokens: int) -> ExpertRows:
    """Experts in turn, so that all have as many tokens, or one more."""
    pairs = torch.arange(num_tokens * _EXPERTS_PER_TOKEN) % num_experts
    experts = pairs.view(num_tokens, -1).sort(1).values
    return ExpertRows(REFERENCE.sort_pairs(experts, num_experts))


def _random_experts(layout: SlotLayout, num_experts: int) -> ExpertSlots:
    slots = ExpertSlots(Arena(num_experts * layout.num_bytes), layout)
    slots.image(0).view(layout.dtype).normal_(std=0.05)
    for expert in range(1, num_experts):
        slots.image(expert).copy_(slots.image(0))
    return slots


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a step (32)")
    parser.add_argument("--experts", type=int, default=60, help="experts on the device (60)")
    parser.add_argument("--repeats", type=int, default=None, help="runs of each, in turn (15)")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a result")
    options = parser.parse_args()
    if options.repeats is None:
        options.repeats = 3 if options.quick else 15
    return options


if __name__ == "__main__":
    run_script(main)
