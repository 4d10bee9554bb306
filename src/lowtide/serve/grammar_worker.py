"""Child process that tries to compile grammars; a script, never imported by the parent.

A grammar of a few kB may take gigabytes, minutes or the whole stack to compile, and a thread doing
so cannot be stopped. A process can: the operating system enforces its limits of memory, stack and
processor time. Needs llguidance alone.

The first process builds the vocabulary, which takes a second for a large model, and forks one
process for each lane. It never compiles, and replaces a lane's process that a grammar has ended.

Each lane reads one JSON object per line and answers with one: `{"num_bytes"}`, the grammar's
memory; `{"error"}`; or `{"signal"}`, which ended the process. All processes end with the input.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

WARM_UP = json.dumps({"grammars": [{"lark_grammar": "start: /[a-z]+/"}]})

AGAIN = 3
"""Exit code of a process that has grown too large and is replaced by a fresh fork."""

GROWN_BYTES = 8 << 20


class Lane(NamedTuple):
    """Pipes of one lane, and a byte in shared memory: 1 while a grammar is compiled."""

    questions: int
    answers: int
    is_busy: mmap.mmap
    max_bytes: int


def main() -> None:
    greeting = json.loads(read_line(0))
    try:
        vocabulary = LLTokenizer(
            greeting["tokenizer"], n_vocab=greeting["vocab_size"], eos_token=greeting["ends"]
        )
    except ValueError as error:
        write(1, {"error": str(error)[-300:]})
        return
    ends = list(map(int, sys.argv[1:]))
    pipes = [(0, 1), *zip(ends[::2], ends[1::2], strict=True)]
    bounds = greeting["max_bytes"]
    lanes = [Lane(*pair, mmap.mmap(-1, 1), most) for pair, most in zip(pipes, bounds, strict=True)]
    limits, stack_bytes = LLParserLimits(**greeting["limits"]), greeting["stack_bytes"]
    del greeting
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what ends a process is told in its lane
    keep(lanes, vocabulary, limits, stack_bytes)


def keep(
    lanes: list[Lane], vocabulary: LLTokenizer, limits: LLParserLimits, stack_bytes: int
) -> None:
    """Keep one process running in each lane until their input ends."""

    def forked(lane: Lane) -> int:
        pid = os.fork()
        if pid:
            return pid
        with suppress(BaseException):
            for other in lanes:
                if other is not lane:
                    os.close(other.questions)
                    os.close(other.answers)
            work_through(lane, vocabulary, limits, stack_bytes)
        os._exit(1)

    running = {forked(lane): lane for lane in lanes}
    write(1, {"is_ready": True})
    while running:
        pid, status = os.wait()
        lane = running.pop(pid)
        if not status:
            continue  # its input has ended
        if lane.is_busy[0]:
            lane.is_busy[0] = 0
            with suppress(BrokenPipeError):
                write(lane.answers, {"signal": max(0, -os.waitstatus_to_exitcode(status))})
        running[forked(lane)] = lane


def work_through(
    lane: Lane, vocabulary: LLTokenizer, limits: LLParserLimits, stack_bytes: int
) -> None:
    """Answer a lane's questions in a thread with a stack of `stack_bytes`, then end the process."""

    def work() -> None:
        code = 1
        try:
            compile_grammar(vocabulary, limits, WARM_UP)
            limit_memory(lane.max_bytes)
            code = answer_all(lane, vocabulary, limits)
        finally:
            os._exit(code)

    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def answer_all(lane: Lane, vocabulary: LLTokenizer, limits: LLParserLimits) -> int:
    """Try grammars until the input ends or this process has grown; return the exit code."""
    first_bytes = peak_bytes()
    while line := read_line(lane.questions):
        lane.is_busy[0] = 1
        request = json.loads(line)
        before_bytes = peak_bytes()
        signal.setitimer(signal.ITIMER_REAL, request["max_wall_s"])
        signal.setitimer(signal.ITIMER_PROF, request["max_cpu_s"])
        error = compile_grammar(vocabulary, limits, request["grammar"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        num_bytes = peak_bytes() - before_bytes
        lane.is_busy[0] = 0
        write(lane.answers, {"error": error} if error else {"num_bytes": num_bytes})
        if peak_bytes() - first_bytes > GROWN_BYTES:
            return AGAIN
    return 0


def compile_grammar(vocabulary: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """Compile a grammar and its first mask; return the error, or ""."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def limit_memory(max_bytes: int) -> None:
    """Limit this process to `max_bytes` beyond its present memory."""
    with suppress(OSError, ValueError):  # no /proc, or a lower bound already
        with open("/proc/self/statm") as file:
            has_bytes = int(file.read().split()[0]) * resource.getpagesize()
        _, ceiling = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (has_bytes + max_bytes, ceiling))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def peak_bytes() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10


def read_line(pipe: int) -> bytes:
    """Read a line, or b"" at the end. Unbuffered: a fork may read the next line."""
    parts = []
    while part := os.read(pipe, 1 << 20):
        parts.append(part)
        if part.endswith(b"\n"):
            return b"".join(parts)
    return b""


def write(pipe: int, answer: dict[str, Any]) -> None:
    """Write an answer in one call: it fits into a pipe's buffer."""
    os.write(pipe, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
