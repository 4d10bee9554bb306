"""Requests that come, grow and go, run by one engine: what each pass took and held."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.memory import division_kept, drop_pages, peak_resident_bytes, reset_peak
from common.run import loaded_engine
from lowtide.config import ModelConfig
from lowtide.decode.intake import Intake
from lowtide.decode.kinds import make_kind
from lowtide.decode.request import Committed, Finished, Request
from lowtide.engine.opening.config import MAX_BLOCK_LENGTH, EngineConfig
from lowtide.engine.running.decoding import make_decoder, run_pass
from lowtide.engine.running.engine import Engine
from lowtide.params import SamplingParams


class Arrival(NamedTuple):
    """Request of a trace: comes once `after` others have finished, ends after `num_new` tokens.

    It allows for `max_tokens` new ones, but may end before, as a chat does with its end token.
    """

    after: int
    num_prompt: int
    max_tokens: int
    num_new: int


def mixed_trace(longest: int, num_new: int) -> list[Arrival]:
    """Return single chats, many at once, one of the greatest length among some, and chats again.

    Whole sequences have `longest` tokens at most.
    """
    short, room = max(16, longest // 64), longest // 4
    chat = Arrival(0, short, room - short, num_new)
    whole = Arrival(0, longest - 2 * num_new, 2 * num_new, num_new)
    alone = [chat._replace(after=i) for i in range(2)]
    crowd = [
        Arrival(2, short * (1 + i % 4), room - short * (1 + i % 4), num_new * (1 + i % 2))
        for i in range(12)
    ]
    document = [each._replace(after=12) for each in (whole, chat, chat)]
    return [*alone, *crowd, *document, *(chat._replace(after=16 + i) for i in range(2))]


def bidirectional_trace(longest: int, num_new: int) -> list[Arrival]:
    """Return the mixed trace for models in which every pass has whole sequences.

    An answer is as long as was asked for. Many at once are half as many rows again as the longest,
    and single chats take four times as many passes: more than a workspace is kept for after the
    last long one.
    """
    short = longest // 16
    chat = Arrival(0, short, 4 * num_new, 4 * num_new)
    whole = Arrival(0, longest - num_new, num_new, num_new)
    alone = [chat._replace(after=i) for i in range(2)]
    crowd = [Arrival(2, short * (1 + i % 3), num_new, num_new) for i in range(12)]
    return [
        *alone,
        *crowd,
        whole._replace(after=12),
        *(chat._replace(after=15 + i) for i in (0, 1)),
    ]


def documents_trace(longest: int, num_new: int) -> list[Arrival]:
    """Return documents that arrive together, each of which allows for exactly the tokens it uses.

    Nothing that is planned for them is ever empty, and those that wait hold memory meanwhile.
    """
    return [Arrival(0, longest // 4 - num_new, num_new, num_new) for _ in range(14)]


def most_at_once(trace: Sequence[Arrival]) -> int:
    """Tokens that all who come together may want at most."""
    wanted: dict[int, int] = {}
    for each in trace:
        wanted[each.after] = wanted.get(each.after, 0) + each.num_prompt + each.max_tokens
    return max(wanted.values())


def run_trace(settings: Mapping[str, Any]) -> dict[str, Any]:
    """One side: an engine of its own, the whole trace, and what became of it.

    A task of `common.worker`. settings: model, budget_bytes, context, moves, policy, trace, and
    read_GBps, the disk's ceiling. Without `moves` the planned division stays.
    """
    options = EngineConfig(
        host_memory=settings["budget_bytes"],
        context=settings["context"],
        policy=settings["policy"],
    )
    drop_pages([Path(settings["model"])])
    with ExitStack() as stack:
        if not settings["moves"]:
            stack.enter_context(division_kept())
        engine = stack.enter_context(loaded_engine(settings["model"], options))
        run = _Run(engine, [Arrival(*each) for each in settings["trace"]])
        with engine.executor.in_charge():
            run.to_the_end()
        return {**run.as_dict(settings["read_GBps"]), **_counts(engine)}


class _Pass(NamedTuple):
    seconds: float
    cpu_s: float  # of all threads
    read_bytes: int
    peak_bytes: int  # the most that the process held meanwhile
    num_running: int  # and not finished by it


class _Run:
    """A trace under way."""

    def __init__(self, engine: Engine, trace: Sequence[Arrival]) -> None:
        self._engine = engine
        self._decoder = make_decoder(engine)
        self._waiting = deque(zip(trace, requests_of(engine.model.config, trace), strict=True))
        self._passes: list[_Pass] = []
        self._num_finished = self._num_tokens = 0

    def to_the_end(self) -> None:
        while self._waiting or self._decoder.has_work:
            while self._waiting and self._waiting[0][0].after <= self._num_finished:
                self._decoder.add(self._waiting.popleft()[1])
            with self._measured():
                events = run_pass(self._engine, self._decoder)
            self._num_tokens += sum(len(e.tokens) for e in events if isinstance(e, Committed))
            self._num_finished += sum(isinstance(event, Finished) for event in events)

    def as_dict(self, read_GBps: float) -> dict[str, Any]:
        """Return the rates, seconds and bytes of the passes.

        `ideal_s` is the passes' time if reads came at the disk's ceiling, all cores were ours, and
        the longer of the two hid the other; it is for machines that others use too.
        """
        passes, plan = self._passes, self._engine.plan
        seconds, cpu_s, read_bytes, peak_bytes, running = map(np.array, zip(*passes, strict=True))
        num_cores = self._engine.executor.num_cores
        ideal_s = float(np.maximum(read_bytes / read_GBps / 1e9, cpu_s / num_cores).sum())
        total_s = float(seconds.sum())
        allowed_bytes = plan.budget_bytes + plan.overhead_bytes
        return {
            "tokens_per_s": self._num_tokens / total_s,
            "ideal_tokens_per_s": self._num_tokens / ideal_s,
            "num_tokens": self._num_tokens,
            "num_passes": len(passes),
            "seconds": total_s,
            "cpu_s": float(cpu_s.sum()),
            "read_bytes": int(read_bytes.sum()),
            "max_running": int(running.max()),
            "mean_running": float((running * seconds).sum() / total_s),
            "max_peak_bytes": int(peak_bytes.max()),
            "allowed_bytes": allowed_bytes,
            "is_within_plan": bool((peak_bytes <= allowed_bytes).all()),
        }

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """One pass, and what is decided after it."""
        stats = self._engine.experts.host.stats
        read_bytes, start_s, cpu_s = stats.read_bytes, time.perf_counter(), time.process_time()
        reset_peak()
        yield
        self._passes.append(
            _Pass(
                time.perf_counter() - start_s,
                time.process_time() - cpu_s,
                stats.read_bytes - read_bytes,
                peak_resident_bytes(),
                len(self._decoder.running),
            )
        )


def _counts(engine: Engine) -> dict[str, Any]:
    stats = engine.as_dict()
    names = ("hit_rate", "num_slots", "num_slots_lent", "num_slots_given", "num_residents_moved")
    plan = engine.plan
    return {
        **{name: stats[name] for name in names if name in stats},
        "num_planned_slots": plan.host.num_slots,
        "kv_cache_bytes": plan.host.kv_cache_bytes,
        "workspace_bytes": plan.host.workspace_bytes,
        "max_cache_tokens": plan.max_cache_tokens,
        "policy_in_force": plan.policy,
    }


def requests_of(config: ModelConfig, trace: Sequence[Arrival]) -> list[Request]:
    """Random prompts, answers that end after as many tokens as each has."""
    context = max(each.num_prompt + each.max_tokens for each in trace)
    intake = Intake(config, None, make_kind(config.decoding), context, MAX_BLOCK_LENGTH)
    draw = np.random.default_rng(0)
    ordinary = min((config.vocab_size, *config.eos_token_ids))  # special ids are the last ones
    requests = []
    for each in trace:
        prompt = draw.integers(0, ordinary, each.num_prompt).tolist()
        params = SamplingParams(max_tokens=each.max_tokens, ignore_eos=True)
        [request] = intake.requests([prompt], params)
        requests.append(replace(request, is_stopped=_Enough(each.num_new)))
    return requests


class _Enough:
    """An answer's end."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def __call__(self, token_ids: Sequence[int]) -> bool:
        return len(token_ids) >= self._num_tokens
