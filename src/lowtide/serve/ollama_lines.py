"""An answer of Ollama's API as it is written: its pieces as lines of JSON, and one line of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from lowtide.parsing.call_json import parsed
from lowtide.parsing.pieces import CallArguments, CallBegun, Done, Piece, Prefilled, Reasoning, Text
from lowtide.serve.conversation import ToolCall, arguments_of
from lowtide.serve.errors import Refusal
from lowtide.serve.reply import JsonObject, Reply
from lowtide.serve.sse import compact_json


@dataclass(slots=True)
class OllamaLines(Reply):
    """Owns the lines of one answer.

    is_chat: whether words stand in a `message`, or beside it. clock: nanoseconds.
    """

    media_type = "application/x-ndjson"
    has_named_events = False

    model: str
    is_chat: bool
    clock: Callable[[], int] = time.monotonic_ns
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _calls: list[ToolCall] = field(default_factory=list)
    _call: ToolCall | None = None  # that is being written
    _num_prefilled: int = 0  # pieces
    _start_ns: int = 0
    _begun_ns: int = 0  # when its prompt began to be read
    _first_ns: int = 0  # when the answer began
    _end: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start_ns = self.clock()

    def ping(self) -> JsonObject:
        """Says that the answer is under way: a line without a word."""
        return self._line("")

    def frames(self, piece: Piece, index: int = 0) -> list[JsonObject]:
        """The lines that a piece makes; a call's when it is whole."""
        if isinstance(piece, Prefilled):
            self._num_prefilled += 1
            if self._num_prefilled == 2:  # the first comes before its turn in the queue
                self._begun_ns = self.clock()
            return []
        self._first_ns = self._first_ns or self.clock()
        if isinstance(piece, Done) and piece.reason == "length":
            self._leave_cut_call()
        lines = [] if isinstance(piece, CallArguments) else self._called()
        if isinstance(piece, Text):
            self._texts.append(piece.joined_text)
            return [*lines, self._line(piece.joined_text)]
        if isinstance(piece, Reasoning):
            self._thoughts.append(piece.joined_text)
            return [*lines, self._line("", thinking=piece.joined_text)]
        if isinstance(piece, CallBegun):
            self._call = ToolCall(piece.id, piece.name, "")
        elif isinstance(piece, CallArguments) and self._call is not None:
            call = self._call
            self._call = ToolCall(call.id, call.name, call.arguments + piece.text)
        elif isinstance(piece, Done):
            self._end = self._ended(piece)
            return [*lines, self._line("") | self._end]
        return lines

    def encode(self, frame: JsonObject) -> bytes:
        """A line of NDJSON."""
        return json_line(frame)

    def failed(self, refusal: Refusal) -> JsonObject:
        """The last line of an answer that cannot be completed."""
        return {"error": refusal.message}

    def whole(self) -> JsonObject:
        """All of the answer in one line, after `Done`."""
        words: dict[str, Any] = {}
        if self._thoughts:
            words["thinking"] = "".join(self._thoughts)
        if self._calls:
            words["tool_calls"] = list(map(_call_object, self._calls))
        return self._line("".join(self._texts), **words) | self._end

    def loaded(self) -> JsonObject:
        """The answer to nothing: the model is there."""
        return self._line("") | {"done": True, "done_reason": "load"}

    def _leave_cut_call(self) -> None:
        """A call comes whole in this API: one that the answer's length has cut is none."""
        if self._call is not None and not isinstance(parsed(self._call.arguments), Mapping):
            self._call = None

    def _called(self) -> list[JsonObject]:
        """The line of the call that was being written."""
        call, self._call = self._call, None
        if call is None:
            return []
        self._calls.append(call)
        return [self._line("", tool_calls=[_call_object(call)])]

    def _line(self, text: str, **words: Any) -> JsonObject:
        head = {"model": self.model, "created_at": timestamp(time.time()), "done": False}
        if not self.is_chat:
            return {**head, "response": text, **words}
        return {**head, "message": {"role": "assistant", "content": text, **words}}

    def _ended(self, done: Done) -> JsonObject:
        end_ns = self.clock()
        return {
            "done": True,
            "done_reason": "length" if done.reason == "length" else "stop",
            "total_duration": end_ns - self._start_ns,
            "load_duration": 0,
            "prompt_eval_count": done.num_prompt,
            "prompt_eval_duration": self._first_ns - (self._begun_ns or self._start_ns),
            "eval_count": done.num_new,
            "eval_duration": end_ns - self._first_ns,
        }


def json_line(value: JsonObject) -> bytes:
    """A line of NDJSON."""
    return compact_json(value).encode() + b"\n"


def timestamp(time_s: float) -> str:
    """A time, as this API writes it."""
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


def _call_object(call: ToolCall) -> JsonObject:
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments_of(call)}}
