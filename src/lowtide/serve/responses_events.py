"""An answer of `/v1/responses` as it is written: its pieces as events, and the response they make.

Knows nothing of HTTP. The response that is not streamed is what is there after the last piece, so
that both forms are the same by construction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowtide.parsing.pieces import (
    CallArguments,
    CallBegun,
    Done,
    Piece,
    Prefilled,
    Reasoning,
    Text,
)
from lowtide.serve.errors import Refusal
from lowtide.serve.openai_fields import new_id
from lowtide.serve.responses_items import CustomInput, ToolForm, sealed
from lowtide.serve.writers import JsonObject


class ResponseEvents:
    """Owns one response and the order of its events, each with a `sequence_number`.

    response: as clients get it, without output. forms: of the tools that may be called. seals:
    whether thoughts are also given in the field that clients send back unread.
    """

    def __init__(
        self, response: JsonObject, forms: Mapping[str, ToolForm], seals: bool = False
    ) -> None:
        self.response = response | {"status": "in_progress", "output": []}
        self._forms, self._seals = forms, seals
        self._item: _Item | None = None  # that is being written
        self._num_events = 0
        self._prefilled = Prefilled(0, 0)

    def ping(self) -> JsonObject:
        """Says that the answer is under way, and how far its prompt is."""
        done, total = self._prefilled.num_done, self._prefilled.num_total
        progress = {"prompt_tokens_done": done, "prompt_tokens": total}
        return self._of_response("response.in_progress") | {"lowtide": progress}

    def take(self, piece: Piece) -> list[JsonObject]:
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
            if not isinstance(self._item, _Reasoning):
                yield from self._open(_Reasoning(self._seals))
            yield from self._more(piece.text)
        elif isinstance(piece, Text):
            if not isinstance(self._item, _Message):
                yield from self._open(_Message())
            yield from self._more(piece.text)
        elif isinstance(piece, CallBegun):
            form = self._forms.get(piece.name, ToolForm(piece.name))
            item = _CustomCall if form.is_custom else _Call
            yield from self._open(item(piece, form))
        elif isinstance(piece, CallArguments):
            yield from self._more(piece.text)
        elif isinstance(piece, Done):
            yield from self._end(piece)

    def _open(self, item: _Item) -> Iterator[JsonObject]:
        yield from self._close("completed")
        self._item = item
        self.response["output"].append(item.fields)
        yield self._of_output("response.output_item.added", item=dict(item.fields))
        yield from self._all_of_item(item.begin())

    def _more(self, text: str) -> Iterator[JsonObject]:
        if self._item is not None:
            yield from self._all_of_item(self._item.more(text))

    def _close(self, status: str) -> Iterator[JsonObject]:
        item = self._item
        if item is None:
            return
        item.fields["status"] = status
        yield from self._all_of_item(item.end())
        yield self._of_output("response.output_item.done", item=dict(item.fields))
        self._item = None

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
        shown = dict(self.response, output=[dict(item) for item in self.response["output"]])
        return self._numbered({"type": kind, "response": shown})

    def _all_of_item(self, events: Sequence[JsonObject]) -> Iterator[JsonObject]:
        """Events of the item that is being written, which name it."""
        for event in events:
            yield self._of_output(item_id=self._output[-1]["id"], **event)

    def _of_output(self, type: str, **fields: Any) -> JsonObject:
        return self._numbered({"type": type, "output_index": len(self._output) - 1, **fields})

    @property
    def _output(self) -> list[JsonObject]:
        output: list[JsonObject] = self.response["output"]
        return output

    def _numbered(self, event: JsonObject) -> JsonObject:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return event


class _Item:
    """An item of the output while it is written. fields: as clients get it."""

    def __init__(self, kind: str, id_prefix: str, **fields: Any) -> None:
        head = {"id": new_id(f"{id_prefix}_"), "type": kind, "status": "in_progress"}
        self.fields: JsonObject = {**head, **fields}
        self._texts: list[str] = []

    def begin(self) -> list[JsonObject]:
        """Events behind the one that it is added with."""
        return []

    def more(self, text: str) -> list[JsonObject]:
        """Events of more of its text."""
        self._texts.append(text)
        return []

    def end(self) -> list[JsonObject]:
        """Events before the one that it is done with; its fields are complete then."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        return "".join(self._texts)


class _TextItem(_Item):
    """An item of one part that is text. part_type: also names its events."""

    part_type = ""
    _of_part: Mapping[str, Any] = {}
    _of_delta: Mapping[str, Any] = {}

    def begin(self) -> list[JsonObject]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def more(self, text: str) -> list[JsonObject]:
        super().more(text)
        kind = f"response.{self.part_type}.delta"
        return [{"type": kind, "content_index": 0, "delta": text, **self._of_delta}]

    def end(self) -> list[JsonObject]:
        part = self._part()
        self.fields["content"] = [part]
        kind = f"response.{self.part_type}.done"
        return [
            {"type": kind, "content_index": 0, "text": self.text, **self._of_delta},
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]

    def _part(self) -> JsonObject:
        return {"type": self.part_type, "text": self.text, **self._of_part}


class _Message(_TextItem):
    part_type = "output_text"
    _of_part = {"annotations": [], "logprobs": []}
    _of_delta = {"logprobs": []}  # where they are missing, openai-python fails

    def __init__(self) -> None:
        super().__init__("message", "msg", role="assistant", content=[])


class _Reasoning(_TextItem):
    part_type = "reasoning_text"

    def __init__(self, seals: bool) -> None:
        super().__init__("reasoning", "rs", summary=[], content=[])
        self._seals = seals

    def end(self) -> list[JsonObject]:
        if self._seals:
            self.fields["encrypted_content"] = sealed(self.text)
        return super().end()


class _Call(_Item):
    """A function's call, whose arguments are JSON."""

    def __init__(self, call: CallBegun, form: ToolForm) -> None:
        super().__init__("function_call", "fc", **_named(call, form), arguments="")

    def more(self, text: str) -> list[JsonObject]:
        super().more(text)
        return [{"type": "response.function_call_arguments.delta", "delta": text}]

    def end(self) -> list[JsonObject]:
        self.fields["arguments"] = self.text
        kind = "response.function_call_arguments.done"
        return [{"type": kind, "name": self.fields["name"], "arguments": self.text}]


class _CustomCall(_Item):
    """A custom tool's call, whose input is a text."""

    def __init__(self, call: CallBegun, form: ToolForm) -> None:
        super().__init__("custom_tool_call", "ctc", **_named(call, form), input="")
        self._input = CustomInput()

    def more(self, text: str) -> list[JsonObject]:
        return self._deltas(self._input.push(text))

    def end(self) -> list[JsonObject]:
        deltas = self._deltas(self._input.finish())
        self.fields["input"] = self.text
        return [*deltas, {"type": "response.custom_tool_call_input.done", "input": self.text}]

    def _deltas(self, text: str) -> list[JsonObject]:
        super().more(text)
        return [{"type": "response.custom_tool_call_input.delta", "delta": text}] if text else []


def _named(call: CallBegun, form: ToolForm) -> dict[str, str]:
    named = {"call_id": call.id, "name": form.name}
    return named if form.namespace is None else {**named, "namespace": form.namespace}


def _usage(done: Done) -> JsonObject:
    return {
        "input_tokens": done.num_prompt,
        "input_tokens_details": {"cached_tokens": done.num_cached},
        "output_tokens": done.num_new,
        "output_tokens_details": {"reasoning_tokens": done.num_reasoning},
        "total_tokens": done.num_prompt + done.num_new,
    }
