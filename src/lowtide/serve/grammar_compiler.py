"""Compiles grammars after a trial in a child process.

A request's grammar may take gigabytes, minutes or the whole stack to compile. So a child process
(`grammar_worker.py`) tries it within bounds. A grammar that passed is compiled again here, in a
thread with as large a stack, since the result cannot be sent between processes; it is kept for
later requests.
"""

from __future__ import annotations

import hashlib
import signal
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from lowtide.child_process import ChildError, ChildProcess
from lowtide.config import format_size
from lowtide.errors import UsageError
from lowtide.serve.errors import QueueFull, Refusal
from lowtide.serve.grammar_reasons import reason_of

T = TypeVar("T")

MAX_CPU_S = 2.0
"""Processor time for compiling one grammar and its first mask."""

MAX_WALL_S = 10.0
MAX_WAIT_S = 60.0
"""Total time that a request waits for other requests' grammars to compile or be freed."""

POLL_S = 0.5
"""Interval at which a waiting request checks that its client is still there."""

STACK_BYTES = 256 << 20
SPARE_STACK_BYTES = 32 << 20
"""Extra stack beyond the trial's, so that a grammar that passed cannot overflow it here."""

MAX_GRAMMAR_BYTES = 24 << 20
"""Largest compiled grammar; a schema of 2,000 properties takes 20 MiB."""

MAX_COMPILED_BYTES = 40 << 20
"""Limit for all compiled grammars that are cached or in use."""

MAX_KEPT = 256
"""Cached grammars, refused ones included."""

CHILD_BYTES = 1 << 30
"""Most memory of the child: one vocabulary, shared by its processes, and what the trials of both
lanes may take before a grammar counts as too large."""

LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,  # a step is on the engine's thread: tens of milliseconds at worst
    "max_lexer_states": 50_000,  # of 1 to 2 kB
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class Bounds(NamedTuple):
    """Limits of one lane's trials. passed_bytes: the most that a passing grammar may take."""

    max_cpu_s: float
    max_wall_s: float
    max_bytes: int
    passed_bytes: int


QUICK = Bounds(0.05, 1.0, 64 << 20, 4 << 20)
SLOW = Bounds(MAX_CPU_S, MAX_WALL_S, 512 << 20, MAX_GRAMMAR_BYTES)
LANES = (QUICK, SLOW)
"""A grammar that fails in the first lane is tried in the second. So an ordinary grammar waits only
for the first 0.05 s of a slow one.

llguidance's panics want to say where they were, for which the first lane's memory may be too small:
then it hangs, and takes no processor time."""

_TOO_LONG = f"it takes more than {MAX_CPU_S:g} s of processor time to compile; make it simpler"
_TOO_LARGE = (
    f"it takes more than {format_size(MAX_GRAMMAR_BYTES)} of memory to compile; make it simpler"
)
_TOO_DEEP = f"it takes more than {format_size(STACK_BYTES)} of stack to compile; make it flatter"
_BY_SIGNAL = {
    signal.SIGPROF: _TOO_LONG,
    signal.SIGSEGV: _TOO_DEEP,
    signal.SIGBUS: _TOO_DEEP,
    signal.SIGABRT: _TOO_LARGE,
    0: _TOO_LARGE,  # Python's own MemoryError
}


class Compiled:
    """A compiled grammar for any number of answers. refusal: the reason if it failed, else ""."""

    def __init__(self, matcher: LLMatcher | None, num_bytes: int, refusal: str = "") -> None:
        self._matcher, self.num_bytes, self.refusal = matcher, num_bytes, refusal

    def matcher(self) -> LLMatcher:
        """Return a matcher at the grammar's start. Raise UsageError if the grammar was refused."""
        if self._matcher is None:
            raise UsageError(f"The answer's form cannot be kept to: {self.refusal}.")
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Owns the child process and the cache. Each lane compiles one grammar at a time."""

    def __init__(
        self, vocabulary: Callable[[], LLTokenizer], greeting: Callable[[], Mapping[str, object]]
    ) -> None:
        """greeting: the vocabulary as the child reads it."""
        self._vocabulary = vocabulary
        bounds = {
            "limits": dict(LIMITS),
            "stack_bytes": STACK_BYTES,
            "max_bytes": [lane.max_bytes for lane in LANES],
        }
        self._child = ChildProcess(
            Path(__file__).with_name("grammar_worker.py"),
            len(LANES),
            lambda: {**bounds, **greeting()},
            {"MALLOC_ARENA_MAX": "1"},  # an arena for each thread takes address space for itself
        )
        self._locks = {lane: _FairLock() for lane in LANES}
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._change = threading.Lock()  # of what is kept
        self._living: weakref.WeakSet[Compiled] = weakref.WeakSet()

    def warm_up(self) -> None:
        """Start the child. A failure is reported with the first grammar."""
        try:
            self._child.start()
        except ChildError:
            return

    def is_known(self, text: str) -> bool:
        """Return True if the grammar is in the cache."""
        return self._found(_digest(text)) is not None

    def compiled(self, text: str, is_gone: threading.Event | None = None) -> Compiled:
        """Compile a grammar, or return why it is refused.

        is_gone: once set, no further compilation starts. Raises QueueFull, or Refusal if the child
        cannot be started.
        """
        digest, is_gone = _digest(text), is_gone or threading.Event()
        end_s = time.monotonic() + MAX_WAIT_S
        for lane in LANES:
            if found := self._found(digest):
                return found
            with self._locks[lane].taken(end_s, is_gone):
                found = self._found(digest) or self._tried(text, lane, end_s, is_gone)
            if found:
                self._keep(digest, found)
                return found
        raise QueueFull("Compiled grammars of other requests are in use. Ask again in 10 s.", 10)

    def _tried(
        self, text: str, lane: Bounds, end_s: float, is_gone: threading.Event
    ) -> Compiled | None:
        """Compile a grammar within one lane's bounds; return None if they are too narrow."""
        answer = self._answer(text, lane)
        if "error" in answer:
            return Compiled(None, 0, reason_of(str(answer["error"])))
        if "signal" in answer:
            if answer["signal"] == signal.SIGALRM:
                if lane is not LANES[-1]:
                    return None
                raise QueueFull(
                    f"The answer's form was not compiled within {lane.max_wall_s:g} s. Ask again "
                    "in 10 s.",
                    10,
                )
            refusal = _BY_SIGNAL.get(answer["signal"])
            if refusal is None:
                raise Refusal(
                    "The process that tries grammars was ended by the system. Ask again.",
                    503,
                    "server_error",
                    retry_after_s=1,
                )
            is_last = lane is LANES[-1] or refusal is _TOO_DEEP
            return Compiled(None, 0, refusal) if is_last else None
        num_bytes = int(answer["num_bytes"])
        if num_bytes > lane.passed_bytes:
            return Compiled(None, 0, _TOO_LARGE) if lane is LANES[-1] else None
        if not self._has_room(num_bytes, end_s if lane is LANES[-1] else 0.0, is_gone):
            return None
        made = Compiled(self._compiled_here(text), num_bytes)
        self._living.add(made)
        return made

    def _answer(self, text: str, lane: Bounds) -> dict[str, Any]:
        """Have the child try a grammar. Raise Refusal."""
        limits = {"max_cpu_s": lane.max_cpu_s, "max_wall_s": lane.max_wall_s}
        try:
            return self._child.ask({"grammar": text, **limits}, 2 * MAX_WALL_S, LANES.index(lane))
        except ChildError as error:
            raise Refusal(
                f"Grammars are tried in a process of their own, and there is none: {error}.",
                503,
                "server_error",
                retry_after_s=10,
            ) from None

    def _compiled_here(self, text: str) -> LLMatcher:
        vocabulary = self._vocabulary()

        def compile_grammar() -> LLMatcher:
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**LIMITS))
            if not matcher.is_error():
                matcher.compute_bitmask()
            return matcher

        return _in_deep_thread(compile_grammar)

    def _found(self, digest: bytes) -> Compiled | None:
        with self._change:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
            return found

    def _keep(self, digest: bytes, made: Compiled) -> None:
        with self._change:
            self._kept[digest] = made
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)

    def _has_room(self, num_bytes: int, end_s: float, is_gone: threading.Event) -> bool:
        """Return True once there is room for another grammar.

        Cached grammars are dropped; for grammars in use it waits until `end_s`.
        """
        while sum(each.num_bytes for each in list(self._living)) + num_bytes > MAX_COMPILED_BYTES:
            with self._change:
                if self._kept:
                    self._kept.popitem(last=False)
                    continue
            if time.monotonic() > end_s or is_gone.wait(POLL_S):
                return False
        return True


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class _FairLock:
    """A lock that serves threads first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[object] = deque()  # the first has the lock
        self._change = threading.Condition()

    @contextmanager
    def taken(self, end_s: float, is_gone: threading.Event) -> Iterator[None]:
        """Hold the lock. Raises QueueFull once `end_s` has passed or `is_gone` is set."""
        mine = object()
        with self._change:
            self._waiting.append(mine)
        try:
            with self._change:
                while self._waiting[0] is not mine:
                    self._change.wait(POLL_S)
                    if is_gone.is_set() or time.monotonic() > end_s:
                        break
                has_lock = self._waiting[0] is mine
            if is_gone.is_set():
                raise QueueFull("The client that asked for this form is gone.", 10)
            if not has_lock:
                raise QueueFull(
                    "Forms of other requests are being compiled. Ask again in 10 s.", 10
                )
            yield
        finally:
            with self._change:
                self._waiting.remove(mine)
                self._change.notify_all()


_stack_size = threading.Lock()


def _in_deep_thread(work: Callable[[], T]) -> T:
    """Call `work` in a new thread with a large stack; return or raise its result."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="lowtide-grammar", daemon=True)
    with _stack_size:  # other threads started now get it, too, which costs address space alone
        before = threading.stack_size(STACK_BYTES + SPARE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()
