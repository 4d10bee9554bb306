"""An answer of `/v1/responses` as it is written: its pieces as events, and the response they make.

Knows nothing of HTTP. The response that is not streamed is what is there after the last piece, so
that both forms are the same by construction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lowtide.parsing.pieces import (
    CallArguments,
    CallBegun,
    Done,
    Piece,
    Prefilled,
    Reasoning,
    Text,
)
from lowtide.serve.custom_tools import CustomInput
from lowtide.serve.errors import Refusal
from lowtide.serve.openai_fields import new_id
from lowtide.serve.reply import JsonObject, Reply
from lowtide.serve.responses_items import ToolForm, sealed


class _ItemType(NamedTuple):
    """How items of a type are written.

    prefix: of their ids. events: what those of their text are called. field: where that text is;
    `text` is in a part of theirs. of_part, of_event: what parts and events have besides.
    """

    prefix: str
    events: str
    field: str = "text"
    of_part: JsonObject = {}
    of_event: JsonObject = {}


_ITEM_TYPES = {
    "message": _ItemType(
        "msg",
        "output_text",
        of_part={"annotations": [], "logprobs": []},
        of_event={"logprobs": []},  # where they are missing, openai-python fails
    ),
    "reasoning": _ItemType("rs", "reasoning_text"),
    "function_call": _ItemType("fc", "function_call_arguments", "arguments"),
    "custom_tool_call": _ItemType("ctc", "custom_tool_call_input", "input"),
}


class ResponseEvents(Reply):
    """Owns one response and the order of its events, each with a `sequence_number`.

    response: as clients get it, without output. forms: of the tools that may be called. seals:
    whether thoughts are also given in the field that clients send back unread.
    """

    def __init__(
        self, response: JsonObject, forms: Mapping[str, ToolForm], seals: bool = False
    ) -> None:
        self._output: list[JsonObject] = []
        self.response = response | {"status": "in_progress", "output": self._output}
        self._forms, self._seals = forms, seals
        self._item: JsonObject = {}  # that is being written
        self._texts: list[str] = []  # of it
        self._input = CustomInput()  # of it, if it is a custom tool's
        self._num_events = 0
        self._prefilled = Prefilled(0, 0)

    def ping(self) -> JsonObject:
        """Says that the answer is under way, and how far its prompt is."""
        done, total = self._prefilled.num_done, self._prefilled.num_total
        progress = {"prompt_tokens_done": done, "prompt_tokens": total}
        return self._of_response("response.in_progress") | {"lowtide": progress}

    def frames(self, piece: Piece, index: int = 0) -> list[JsonObject]:
        """The events that a piece makes; the first piece's begin the answer, `Done`'s end it."""
        begun = () if self._num_events else ("response.created", "response.in_progress")
        return [*map(self._of_response, begun), *self._taken(piece)]

    def failed(self, refusal: Refusal) -> JsonObject:
        """The last event of an answer that cannot be completed."""
        code = refusal.code or "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": refusal.message}}
        return self._of_response("response.failed")

    def whole(self) -> JsonObject:
        """The response, complete after `Done`."""
        return self.response

    def _taken(self, piece: Piece) -> Iterator[JsonObject]:
        if isinstance(piece, Prefilled):
            self._prefilled = piece
        elif isinstance(piece, Reasoning):
            yield from self._in_item("reasoning", piece, summary=[], content=[])
        elif isinstance(piece, Text):
            yield from self._in_item("message", piece, role="assistant", content=[])
        elif isinstance(piece, CallBegun):
            form = self._forms.get(piece.name, ToolForm(piece.name))
            of_call = {"call_id": piece.id, "name": form.name}
            if form.namespace is not None:
                of_call["namespace"] = form.namespace
            kind = "custom_tool_call" if form.is_custom else "function_call"
            yield from self._open(kind, **of_call, **{_ITEM_TYPES[kind].field: ""})
        elif isinstance(piece, CallArguments) and self._item:
            is_custom = self._item["type"] == "custom_tool_call"
            yield from self._delta(self._input.push(piece.text) if is_custom else piece.text)
        elif isinstance(piece, Done):
            yield from self._end(piece)

    def _in_item(self, kind: str, more: Text | Reasoning, **fields: Any) -> Iterator[JsonObject]:
        """More of an item of text, which may be a new one."""
        if self._item.get("type") != kind or more.is_new_part:
            yield from self._open(kind, **fields)
        yield from self._delta(more.text)

    def _open(self, kind: str, **fields: Any) -> Iterator[JsonObject]:
        yield from self._close("completed")
        head = {"id": new_id(f"{_ITEM_TYPES[kind].prefix}_"), "type": kind, "status": "in_progress"}
        self._item, self._texts, self._input = {**head, **fields}, [], CustomInput()
        self._output.append(self._item)
        yield self._of_output("response.output_item.added", item=dict(self._item))
        yield from self._of_part("added")

    def _delta(self, text: str) -> Iterator[JsonObject]:
        self._texts.append(text)
        if text or self._item["type"] != "custom_tool_call":
            yield self._of_text("delta", delta=text)

    def _close(self, status: str) -> Iterator[JsonObject]:
        item = self._item
        if not item:
            return
        item["status"] = status
        if item["type"] == "custom_tool_call":
            yield from self._delta(self._input.finish())
        name, text = _ITEM_TYPES[item["type"]].field, "".join(self._texts)
        if name != "text":
            item[name] = text
        elif item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(text)
        of_call = {"name": item["name"]} if item["type"] == "function_call" else {}
        yield self._of_text("done", **of_call, **{name: text})
        yield from self._of_part("done")
        yield self._of_output("response.output_item.done", item=dict(item))
        self._item = {}

    def _end(self, done: Done) -> Iterator[JsonObject]:
        is_cut = done.reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        self.response["status"] = status
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self.response["usage"] = _usage(done)
        yield self._of_response(f"response.{status}")

    def _of_response(self, kind: str) -> JsonObject:
        shown = dict(self.response, output=[dict(item) for item in self._output])
        return self._numbered({"type": kind, "response": shown})

    def _of_part(self, ending: str) -> Iterator[JsonObject]:
        """An event of the one part that an item of text has; other items have none."""
        form = _ITEM_TYPES[self._item["type"]]
        if form.field == "text":
            part = {"type": form.events, "text": "".join(self._texts), **form.of_part}
            self._item["content"] = [part] if ending == "done" else []
            kind = f"response.content_part.{ending}"
            yield self._of_output(kind, item_id=self._item["id"], content_index=0, part=part)

    def _of_text(self, ending: str, **fields: str) -> JsonObject:
        form = _ITEM_TYPES[self._item["type"]]
        place = {"content_index": 0} if form.field == "text" else {}
        own = {"item_id": self._item["id"], **place, **fields, **form.of_event}
        return self._of_output(f"response.{form.events}.{ending}", **own)

    def _of_output(self, kind: str, **fields: Any) -> JsonObject:
        return self._numbered({"type": kind, "output_index": len(self._output) - 1, **fields})

    def _numbered(self, event: JsonObject) -> JsonObject:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return event


def _usage(done: Done) -> JsonObject:
    return {
        "input_tokens": done.num_prompt,
        "input_tokens_details": {"cached_tokens": done.num_resumed},
        "output_tokens": done.num_new,
        "output_tokens_details": {"reasoning_tokens": done.num_reasoning},
        "total_tokens": done.num_prompt + done.num_new,
    }
