"""One loaded model for all APIs: takes an `Ask`, yields pieces of an answer.

async with aclosing(service.answer(Ask(conversation, params=params))) as pieces:
    async for piece in pieces:
        ...
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from lowtide.async_llm import AsyncLLM
from lowtide.decode.request import Committed, Draft, Event, Finished, Prefill, Request
from lowtide.errors import InternalError, UsageError
from lowtide.files.json_file import as_text
from lowtide.memory.heap import return_heap
from lowtide.model_folder.tokenizer import TooManyTokens
from lowtide.params import MAX_SEED, SamplingParams
from lowtide.parsing import parser_of
from lowtide.parsing.answer_pieces import AnswerPieces, CompletionTest, PlainText
from lowtide.parsing.pieces import Logprobs, Piece, Prefilled
from lowtide.parsing.tools import Tool
from lowtide.plan import MemoryPlan
from lowtide.serve.admission import Admission, QueuePlace
from lowtide.serve.conversation import Conversation
from lowtide.serve.errors import Draining, Refusal, TimedOut, TooLong
from lowtide.serve.frames import FrameWriter
from lowtide.serve.grammar import Grammars, check_kept
from lowtide.serve.grammar_compiler import CHILD_BYTES
from lowtide.serve.grammar_text import Constraint
from lowtide.serve.guard import MAX_BODY_BYTES
from lowtide.serve.request_log import Served
from lowtide.serve.settings import ServeSettings
from lowtide.serve.sse import PING_S
from lowtide.serve.together import Together

T = TypeVar("T")

_log = logging.getLogger(__name__)

State = Literal["ready", "draining", "ended"]
"""ready: accepts requests. draining: accepts no more. ended: the engine has stopped."""

SHUTDOWN_S = 30.0
"""Time that running answers have to finish at shutdown."""

LAST_WORDS_S = 2.0
"""Part of `SHUTDOWN_S` kept for telling clients of unfinished answers."""

SPARE_THREADS = 16
"""Threads in addition to one per request: for counting tokens, statistics and returning memory."""

IDLE_S = 2.0
"""Interval at which an idle server checks the system's free memory."""

MAX_DISCLOSED = 400
"""Longest header that says why calls are not held to their tools' schemas or grammars."""

_NOT_SHOWN = re.compile(r"[^ -~]")

_DRAIN_POLL_S = 0.05

QUEUED_CONTEXTS = 8
"""Default limit of waiting prompt tokens, in contexts."""

SHORT_CHARS, SHORT_TURNS = 8 << 10, 64
"""Longest prompt that is made together with others in one thread."""


@dataclass(frozen=True)
class Ask:
    """A request for one answer, to a conversation or to a prompt of text or token ids.

    params: sampling parameters with `n` = 1.
    adds_special: the tokenizer adds its beginning-of-text token to a text prompt.
    tool_choice: auto, none, required or a function's name.
    cut_to_room: reduce a `max_tokens` that does not fit, instead of refusing it.
    parallel_calls: the answer may make several calls.
    disclosed: response headers, complete once the first piece has come.
    """

    conversation: Conversation | None = None
    prompt: str | Sequence[int] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    adds_special: bool = True
    template_options: Mapping[str, object] = field(default_factory=dict)
    tool_choice: str = "auto"
    constraint: Constraint | None = None
    wants_frames: bool = False
    wants_progress: bool = False
    cut_to_room: bool = False
    parallel_calls: bool = True
    disclosed: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.conversation is None or self.tool_choice == "none":
            return ()
        return self.conversation.tools

    @property
    def has_form(self) -> bool:
        """True if a grammar may have to be compiled."""
        return self.constraint is not None or bool(self.tools)

    @property
    def is_short(self) -> bool:
        """True if the prompt takes only a moment to make."""
        if self.conversation is None:
            return len(self.prompt or ()) <= SHORT_CHARS
        turns = self.conversation.turns
        if self.conversation.tools or len(turns) > SHORT_TURNS:
            return False
        num_chars = sum(len(turn.text) + len(turn.reasoning) for turn in turns)
        return num_chars <= SHORT_CHARS and not any(turn.tool_calls for turn in turns)


class _Prepared(NamedTuple):
    """A prompt and its request. request: None if a grammar is still to be compiled."""

    prompt_ids: list[int]
    request: Request | None


class Service:
    """Answers requests with a loaded model, which it does not close."""

    def __init__(
        self, llm: AsyncLLM, settings: ServeSettings | None = None, caller: int = 0
    ) -> None:
        """caller: `Request.caller` of all requests; 0: each has its own."""
        self.llm = llm
        self._caller = caller
        self.settings = settings or ServeSettings()
        self.context = min(llm.plan.context, llm.config.max_positions)
        self.model_name = self.settings.served_name or name_of(llm.name)
        self.created = int(time.time())
        max_queued = self.settings.max_queued_tokens or QUEUED_CONTEXTS * self.context
        self.admission = Admission(self.settings.max_requests, max_queued)
        self.on_served: list[Callable[[Served], None]] = []
        self._end_s = math.inf  # when answers under way are no longer waited for
        self._waits: set[asyncio.Timeout] = set()
        self._grammars = Grammars(llm.config, llm.tokenizer)
        self._frames = FrameWriter(llm.tokenizer)
        # Apart: one template renders at a time, and a text needs none.
        self._short_chats = Together(self._prepared)
        self._short_texts = Together(self._prepared)
        self.plan = served_plan(llm)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Run a server's background work for the lifetime of its app.

        Requests wait in a thread pool of their own, which becomes the event loop's default. While
        no request is running, memory is returned to the system. On exit the service drains, and
        running answers have `SHUTDOWN_S`.
        """
        # asyncio has few threads by default: requests that wait in them would hold up all others.
        threads = ThreadPoolExecutor(self.settings.max_requests + SPARE_THREADS, "lowtide-request")
        asyncio.get_running_loop().set_default_executor(threads)
        # What is there now stays: to look through it takes Python's lock for a tenth of a second.
        # A program around this one may have frozen what it has itself, and goes on with it so.
        freezes = gc.get_freeze_count() == 0
        if freezes:
            gc.collect()
            gc.freeze()
        idling = asyncio.create_task(self._idle())
        try:
            yield
        finally:
            if freezes:
                gc.unfreeze()
            idling.cancel()
            self.drain(SHUTDOWN_S - LAST_WORDS_S)
            end_s = time.monotonic() + SHUTDOWN_S
            while not self.is_idle and time.monotonic() < end_s:
                await asyncio.sleep(_DRAIN_POLL_S)

    async def _idle(self) -> None:
        """Return memory between requests, when no forward pass does it."""
        num_before = 0
        while True:
            await asyncio.sleep(IDLE_S)
            if not self.is_idle:
                continue
            try:
                await self.release_memory()
            except Exception as error:  # a request that meets the same fault is told of it
                _log.error("Memory could not be given back: %s", error, exc_info=error)
            num_entered = self.admission.num_entered
            if num_entered != num_before:  # large texts leave hundreds of MiB there
                await asyncio.to_thread(return_heap)
                num_before = num_entered

    @property
    def state(self) -> State:
        """The server's state, as health checks see it."""
        if self.llm.is_closed:
            return "ended"
        return "draining" if self.admission.is_draining else "ready"

    @property
    def is_idle(self) -> bool:
        """True if no request is running or waiting."""
        return not (self.admission.num_running or self.admission.num_waiting)

    def warm_up(self) -> None:
        """Prepare for the first grammar, which would otherwise wait."""
        self._grammars.warm_up()

    async def release_memory(self) -> None:
        """Return memory if the system runs short of it."""
        if self.state != "ended":
            await self.llm.release_memory()

    def drain(self, limit_s: float = math.inf) -> None:
        """Accept no more requests; running ones fail after `limit_s`.

        May be called from any thread; with a limit, only on the event loop's.
        """
        self.admission.is_draining = True
        if limit_s == math.inf:
            return
        self._end_s = min(self._end_s, time.monotonic() + limit_s)
        end_s = asyncio.get_running_loop().time() + limit_s
        for wait in self._waits:
            if (wait.when() or 0.0) > end_s:
                wait.reschedule(end_s)

    def check_model(self, name: str | None) -> None:
        """Raise Refusal (404) unless the name is the loaded model's; `:latest` may follow it."""
        if name and name.removesuffix(":latest") != self.model_name.removesuffix(":latest"):
            raise Refusal(
                f"The model {name!r:.80} does not exist; this server has {self.model_name!r}.",
                404,
                param="model",
                code="model_not_found",
            )

    def check_num_answers(self, num_answers: int, param: str) -> None:
        """Raise Refusal if a request wants more answers than may ever run and wait at once."""
        most = self.settings.max_requests
        if num_answers > most:
            raise Refusal(
                f"{num_answers} answers are more than the {most} that may run and wait at once.",
                param=param,
            )

    async def prompt_ids(self, ask: Ask) -> list[int]:
        """Return the token ids of an admitted request's prompt.

        Raises UsageError, and TooLong as soon as the count exceeds any possible prompt.
        """
        return await asyncio.to_thread(self._prompt_ids, ask)

    def _prompt_ids(self, ask: Ask) -> list[int]:
        most = self.llm.max_new_tokens(0, ask.params)  # the whole room
        try:
            if ask.conversation is not None:
                messages, options = _rendered_with(ask)
                return self.llm.prompt_ids(messages, template_options=options, max_tokens=most)
            if ask.prompt is None:
                raise UsageError("There is neither a conversation nor a prompt.")
            return self.llm.prompt_ids(
                ask.prompt, raw=True, add_special_tokens=ask.adds_special, max_tokens=most
            )
        except TooManyTokens as error:
            wanted = ask.params.max_tokens or 1
            raise TooLong(error.num_tokens, wanted, self.context, is_counted=False) from None

    async def _prepare(self, ask: Ask) -> _Prepared:
        """Make the engine's request in a thread. Raises as `prompt_ids` and `_request`."""
        if not ask.is_short:
            return await asyncio.to_thread(self._prepared, ask)
        together = self._short_texts if ask.conversation is None else self._short_chats
        return await together(ask)

    def _prepared(self, ask: Ask) -> _Prepared:
        prompt_ids = self._prompt_ids(ask)
        return _Prepared(prompt_ids, None if ask.has_form else self._request(ask, prompt_ids))

    async def count(self, ask: Ask) -> int:
        """Count a prompt's tokens. Raise UsageError, TooLong, Draining or QueueFull."""
        with self.admission.enter():
            return len(await self.prompt_ids(ask))

    async def in_time(self, start_s: float, work: Awaitable[T]) -> T:
        """Await work for a request that came at `start_s` on the monotonic clock.

        Raises TimedOut or Draining once the request's or the server's time is over.
        """
        limit_s = self.settings.request_timeout_s
        end_s = min(start_s + limit_s, self._end_s)
        wait = asyncio.timeout(end_s - time.monotonic())
        self._waits.add(wait)
        try:  # Python 3.11's wait_for loses a cancellation that comes with an event
            async with wait:
                return await work
        except TimeoutError:
            is_at_end = time.monotonic() >= self._end_s
            raise (Draining() if is_at_end else TimedOut(limit_s)) from None
        finally:
            self._waits.discard(wait)

    async def answer(self, ask: Ask, *, is_whole: bool = False) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of one answer: first `Prefilled`, last `Done`.

        `Prefilled` follows all checks, except that a stream begins after `PING_S` if a grammar is
        still compiling; a refusal may follow then. Closing the generator ends the answer between
        two passes. is_whole: the answer is read only at its end, so pieces come late and few.
        Raises Refusal or LowtideError.
        """
        watch = _Watch()
        try:
            with self.admission.enter() as place:
                prompt_ids, request = await self._prepare(ask)
                watch.num_prompt = len(prompt_ids)
                is_told = False
                if request is None:
                    async with self._making(ask, prompt_ids) as making:
                        made, _ = await asyncio.wait([making], timeout=PING_S)
                        if not made:
                            is_told = True
                            yield Prefilled(0, len(prompt_ids))
                        request = await self.in_time(watch.start_s, making)
                pieces = self._reader(ask, prompt_ids)
                place.wait_with(len(prompt_ids))
                if not is_told:
                    yield Prefilled(0, len(prompt_ids))
                async with aclosing(self._events(request, is_whole, watch)) as events:
                    async for event in events:
                        watch.note(event, place)
                        for piece in self._pieces(ask, event, request, pieces):
                            yield piece
                if not watch.reason:
                    raise InternalError("The engine's events have ended before the answer.")
        except (asyncio.CancelledError, GeneratorExit):
            watch.reason = watch.reason or "abort"
            raise
        except BaseException:
            watch.reason = "error"
            raise
        finally:
            self._notify(watch.served())

    @asynccontextmanager
    async def _making(
        self, ask: Ask, prompt_ids: list[int]
    ) -> AsyncGenerator[asyncio.Future[Request], None]:
        """Make the engine's request in a thread; leaving the context abandons it."""
        is_gone = threading.Event()
        making = asyncio.ensure_future(asyncio.to_thread(self._request, ask, prompt_ids, is_gone))
        try:
            yield making
        finally:
            is_gone.set()
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)

    def _request(
        self, ask: Ask, prompt_ids: list[int], is_gone: threading.Event | None = None
    ) -> Request:
        """Make the engine's request.

        A grammar may take seconds to compile, and is not begun once the client has gone. Raises
        TooLong or LowtideError.
        """
        if ask.constraint is not None and ask.conversation is not None:
            _check_is_not_begun(ask.conversation)
        params = self._fitted(ask, len(prompt_ids))
        [request] = self.llm.requests(prompt_ids, params, raw=True)
        if ask.conversation is None:
            return request
        if params.stop_strings or not ask.parallel_calls:
            # Calls and thoughts have no stop strings: a reader that knows them, for the engine.
            test = CompletionTest(self._reader(ask, prompt_ids))
            request = replace(request, is_stopped=test)

        def disclose(reason: str) -> None:
            ask.disclosed["x-lowtide-unguided"] = _NOT_SHOWN.sub("?", reason)[:MAX_DISCLOSED]

        return self._grammars.applied(
            request,
            ask.constraint,
            ask.tools,
            ask.tool_choice,
            ask.parallel_calls,
            is_gone,
            disclose,
        )

    def _reader(self, ask: Ask, prompt_ids: Sequence[int]) -> AnswerPieces:
        """Return the parser of an answer's tokens."""
        tokenizer, stop = self.llm.tokenizer, ask.params.stop_strings
        if tokenizer is None or ask.conversation is None:
            return AnswerPieces(PlainText(tokenizer, prompt_ids), stop)
        parser = parser_of(tokenizer, prompt_ids, ask.tools)
        return AnswerPieces(parser, stop, ask.parallel_calls)

    def _fitted(self, ask: Ask, num_prompt: int) -> SamplingParams:
        """Return the parameters with a seed, and a length that fits the context. Raise TooLong."""
        params = ask.params
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(MAX_SEED))
        room, wanted = self.llm.max_new_tokens(num_prompt, params), params.max_tokens
        if room < 1 or (wanted or 0) > room and not ask.cut_to_room:
            raise TooLong(num_prompt, wanted or 1, self.context)
        return params if wanted is None else replace(params, max_tokens=min(wanted, room))

    async def _events(
        self, request: Request, is_whole: bool, watch: _Watch
    ) -> AsyncGenerator[Event, None]:
        """Yield the engine's events for a request until it ends or times out."""
        request = replace(request, caller=self._caller)
        async with aclosing(self.llm.events([request], is_whole=is_whole)) as events:
            while True:
                try:
                    event = await self.in_time(watch.start_s, anext(events))
                except StopAsyncIteration:
                    return
                yield event

    def _pieces(
        self, ask: Ask, event: Event, request: Request, pieces: AnswerPieces
    ) -> list[Piece]:
        """Translate one engine event into pieces."""
        if isinstance(event, Prefill):
            prefilled = Prefilled(event.num_done, event.num_total)
            return [prefilled] if ask.wants_progress else []
        if isinstance(event, Draft):
            if not ask.wants_frames:
                return []
            return [self._frames.frame_of(event, len(request.prompt))]
        if isinstance(event, Committed):
            new = pieces.push(event.tokens)
            return [Logprobs(event.logprobs), *new] if event.logprobs else new
        check_kept(request)
        return [*pieces.finish(event.finish_reason == "length"), pieces.done(request, event)]

    def _notify(self, served: Served) -> None:
        for listener in self.on_served:
            listener(served)


def _rendered_with(ask: Ask) -> tuple[list[dict[str, Any]], dict[str, object]]:
    """Return the messages and further variables for the chat template."""
    options = dict(ask.template_options)
    if ask.tools:
        options["tools"] = [tool.declaration() for tool in ask.tools]
    return [] if ask.conversation is None else ask.conversation.messages(), options


class _Watch:
    """Measures one request: its times, counts and end."""

    def __init__(self) -> None:
        self.start_s = time.monotonic()
        self.num_prompt = self.num_new = self._num_kept = self._num_first = 0
        self.reason = ""
        self._begun_s: float | None = None
        self._first_s: float | None = None

    def note(self, event: Event, place: QueuePlace) -> None:
        """Record an event of the engine."""
        now_s = time.monotonic() - self.start_s
        if self._begun_s is None:
            self._begun_s = now_s
            place.begin()
        if isinstance(event, Committed):
            self.num_new += len(event.tokens)
            if self._first_s is None:
                self._first_s, self._num_first = now_s, len(event.tokens)
        elif isinstance(event, Finished):
            self.reason, self._num_kept = event.finish_reason, event.num_resumed

    def served(self) -> Served:
        """Return the measurements of a finished request."""
        total_s = time.monotonic() - self.start_s
        queue_s = total_s if self._begun_s is None else self._begun_s
        counts = (self.num_prompt, self.num_new)
        more = (self._num_first, self._num_kept)
        return Served(self.reason, *counts, queue_s, self._first_s, total_s, *more)


def _check_is_not_begun(conversation: Conversation) -> None:
    if conversation.is_begun:  # a form holds for a whole answer
        raise Refusal(
            "The last message is an answer that is begun, and the form that is asked for would "
            "hold for its continuation alone: leave one of them out.",
            param="messages",
            code="unsupported",
        )


def served_plan(llm: AsyncLLM) -> MemoryPlan:
    """Return the model's plan with the memory of a server added.

    It is for the process that tries grammars, and for texts while they are tokenised.
    """
    if llm.tokenizer is None:
        return llm.plan
    context = min(llm.plan.context, llm.config.max_positions)
    return replace(
        llm.plan,
        grammars_bytes=CHILD_BYTES if llm.config.decoding.writes_in_order else 0,
        texts_bytes=llm.tokenizer.work_bytes(MAX_BODY_BYTES, context),
    )


def name_of(model: str) -> str:
    """Return the name by which clients call a model: a path's last part, or the name as given."""
    path = Path(model)
    if not path.exists():
        return model
    path = path.resolve()
    return as_text(path.stem if path.is_file() else path.name)
