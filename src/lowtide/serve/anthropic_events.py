"""An answer of `/v1/messages` as it is written: its pieces as events, and the message they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lowtide.parsing.call_json import json_text, parsed
from lowtide.parsing.pieces import (
    CallArguments,
    CallBegun,
    Done,
    Piece,
    Prefilled,
    Reasoning,
    Text,
)
from lowtide.serve.conversation import ToolCall, arguments_of
from lowtide.serve.errors import Refusal, body_of
from lowtide.serve.openai_fields import new_id
from lowtide.serve.reply import JsonObject, Reply

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By the type of a block: the type of what is added to it, and the field that holds that."""

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageEvents(Reply):
    """Owns one message and its events, which are named by their `type`.

    A call's arguments are sent once they are whole: clients end a stream of what is no JSON with an
    error, and take a beginning for all of it.
    """

    def __init__(self, model: str) -> None:
        self._message: JsonObject = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        self._blocks: list[JsonObject] = []
        self._texts: list[str] = []  # of the last block
        self._is_open = False
        self._prefilled = Prefilled(0, 0)

    def ping(self) -> JsonObject:
        """Says that the answer is under way, and how far its prompt is."""
        done, total = self._prefilled.num_done, self._prefilled.num_total
        return {"type": "ping", "lowtide": {"prompt_tokens_done": done, "prompt_tokens": total}}

    def frames(self, piece: Piece, index: int = 0) -> list[JsonObject]:
        """The events that a piece makes; the first piece's begin the answer, `Done`'s end it."""
        if isinstance(piece, Prefilled):
            self._prefilled = piece
            if self._message["usage"]:
                return []
            self._message["usage"] = _usage(piece.num_total, 0, 0)
            return [{"type": "message_start", "message": dict(self._message)}]
        return list(self._taken(piece))

    def failed(self, refusal: Refusal) -> JsonObject:
        """The last event of an answer that cannot be completed."""
        return body_of(refusal, "/v1/messages")

    def whole(self) -> JsonObject:
        """The message, complete after `Done`."""
        return self._message | {"content": self._blocks}

    def _taken(self, piece: Piece) -> Iterator[JsonObject]:
        if isinstance(piece, Reasoning):
            yield from self._in_block("thinking", piece, thinking="", signature="")
        elif isinstance(piece, Text):
            yield from self._in_block("text", piece, text="")
        elif isinstance(piece, CallBegun):
            call = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            yield from self._open(call)
        elif isinstance(piece, CallArguments):
            self._texts.append(piece.text)
        elif isinstance(piece, Done):
            yield from self._end(piece)

    def _in_block(self, kind: str, more: Text | Reasoning, **fields: str) -> Iterator[JsonObject]:
        """More of a block of text, which may be a new one."""
        if not self._is_open or self._blocks[-1]["type"] != kind or more.is_new_part:
            yield from self._open({"type": kind, **fields})
        self._texts.append(more.text)
        yield self._delta(more.text)

    def _open(self, block: JsonObject) -> Iterator[JsonObject]:
        yield from self._close()
        self._blocks.append(block)
        self._texts, self._is_open = [], True
        yield self._of_block("content_block_start", content_block=dict(block))

    def _delta(self, text: str) -> JsonObject:
        kind, field = _DELTAS[self._blocks[-1]["type"]]
        return self._of_block("content_block_delta", delta={"type": kind, field: text})

    def _close(self, is_cut: bool = False) -> Iterator[JsonObject]:
        """End the last block; is_cut: by the answer's length, so that a call that is not whole has
        no arguments.
        """
        if not self._is_open:
            return
        block, text = self._blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            is_object = isinstance(parsed(text), Mapping)
            if text and (is_object or not is_cut):
                block["input"] = arguments_of(ToolCall("", "", text))
                yield self._delta(text if is_object else json_text(block["input"]))
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            yield self._of_block("content_block_delta", delta=signature)
        yield self._of_block("content_block_stop")
        self._is_open = False

    def _end(self, done: Done) -> Iterator[JsonObject]:
        yield from self._close(is_cut=done.reason == "length")
        reason = "stop_sequence" if done.stop_string is not None else _REASONS[done.reason]
        stop = {"stop_reason": reason, "stop_sequence": done.stop_string}
        self._message |= stop
        usage = self._message["usage"] = _usage(done.num_prompt, done.num_resumed, done.num_new)
        yield {"type": "message_delta", "delta": stop, "usage": usage}
        yield {"type": "message_stop"}

    def _of_block(self, kind: str, **fields: JsonObject) -> JsonObject:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def _usage(num_prompt: int, num_resumed: int, num_new: int) -> JsonObject:
    """Tokens whose keys were kept are not among those of the input, as Anthropic counts."""
    return {
        "input_tokens": num_prompt - num_resumed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_resumed,
        "output_tokens": num_new,
    }
