"""Answers a batch's lines on all nodes of a Ray cluster; only this process writes.

Each engine answers as many lines at once as `batch.answer_all` would. The lines of a lost worker go
to another. Ray may then deliver an answer twice, or none for a line: repeated answers are ignored,
and missing ones are requested once more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import ray
import ray.data

from lowtide.async_llm import AsyncLLM
from lowtide.errors import InternalError
from lowtide.progress import Progress
from lowtide.serve.batch import MAX_AT_ONCE, Answerer, Sink, answering, default_at_once
from lowtide.serve.batch_files import Asked, AskedLines, is_error
from lowtide.serve.ray_share import Share, node_resources, share_of, with_own_cores

_PARTS_PER_WORKER = 8
"""Least number of parts per worker, so that a late worker still finds some."""

_WIDTHS_PER_PART = 4
"""Most lines of a part, in multiples of the lines that run at once; at a part's end fewer run."""

_BATCHES_AT_ONCE = 4
"""Calls of a worker that Ray runs at a time in one part; further lines wait in the worker."""

_ROUNDS = 3
"""Most times that lines are handed to Ray; those still without an answer are then an error."""


class Worker:
    """One engine of the cluster."""

    def __init__(
        self, model: str, options: Mapping[str, Any], served_name: str, at_once: int | None
    ) -> None:
        self._llm = AsyncLLM(model, **with_own_cores(options))
        self._at_once = at_once or default_at_once(self._llm)
        self._room = asyncio.Semaphore(self._at_once)  # Ray hands more lines to an actor
        self._served_name = served_name
        self._answerer: Answerer | None = None
        self._stack = AsyncExitStack()

    async def __call__(self, batch: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer lines, each as soon as it is complete."""
        if self._answerer is None:
            context = answering(self._llm, self._served_name, self._at_once)
            self._answerer = await self._stack.enter_async_context(context)
        answers = [self._answer(self._answerer, str(text)) for text in batch["line"]]
        for answer in asyncio.as_completed(answers):
            yield {"answer": [await answer]}

    async def _answer(self, answerer: Answerer, text: str) -> str:
        async with self._room:
            return json.dumps(await answerer.answer(json.loads(text)))


def answer_on_cluster(
    model: str,
    options: Mapping[str, Any],
    served_name: str,
    lines: AskedLines,
    pending: Sequence[Asked],
    sink: Sink,
    at_once: int | None,
    progress: Progress,
) -> None:
    """Answer `pending`, in any order, on the cluster of `RAY_ADDRESS` or a new local one.

    Raises UsageError or PlanError if no node can hold the model, InternalError if lines remain
    without an answer, and the errors of `sink`.
    """
    with _connected():
        cores = options.get("cores")
        without = {name: each for name, each in options.items() if name != "cores"}
        share = share_of(model, without, None if cores is None else int(cores))
        engine = (model, share.options, served_name, at_once)
        left = {asked.custom_id: asked for asked in pending}
        for _ in range(_ROUNDS):
            for answer in _answers(share, engine, lines, list(left.values()), at_once):
                custom_id = answer["custom_id"]
                if left.pop(custom_id, None) is not None:
                    sink.write(custom_id, json.dumps(answer).encode() + b"\n", is_error(answer))
                    progress("answering", len(pending) - len(left), len(pending))
            if not left:
                return
    raise InternalError(f"{len(left)} lines came back from the cluster without an answer.")


def _answers(
    share: Share,
    engine: tuple[Any, ...],
    lines: AskedLines,
    pending: Sequence[Asked],
    at_once: int | None,
) -> Iterator[dict[str, Any]]:
    """Have Ray answer lines once."""
    num_workers = max(1, min(share.num_on(node_resources()), len(pending)))
    width = at_once or MAX_AT_ONCE
    num_parts = max(_PARTS_PER_WORKER * num_workers, len(pending) // (_WIDTHS_PER_PART * width))
    rows = [{"line": json.dumps(lines.request(asked))} for asked in pending]
    asked_rows = ray.data.from_items(rows, override_num_blocks=min(len(rows), num_parts))
    answers = asked_rows.map_batches(
        Worker,
        fn_constructor_args=engine,
        batch_size=-(-width // (_BATCHES_AT_ONCE - 1)),
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=num_workers),
        num_cpus=share.num_cpus,
        memory=share.memory_bytes,
    )
    for row in answers.iter_rows():
        yield json.loads(row["answer"])


class _connected:
    """A connection to a cluster, which is left as it was found."""

    def __enter__(self) -> None:
        self._is_own = not ray.is_initialized()
        if self._is_own:
            ray.init(
                address=os.environ.get("RAY_ADDRESS"),
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        ray.data.DataContext.get_current().enable_progress_bars = False
        for name in ("ray", "ray.data"):  # its own lines would stand between the command's
            logging.getLogger(name).setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        if self._is_own:
            ray.shutdown()
