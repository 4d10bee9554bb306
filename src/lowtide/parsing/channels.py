"""Answers of gpt-oss: messages, each behind a header that names its channel and its recipient.

`analysis` is thoughts; a message to a function is a call; all else is the answer's text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_forms import new_call_id
from lowtide.parsing.call_json import arguments_text, is_name
from lowtide.parsing.marked_text import Mark, last_mark
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.streamed_call import StreamedCall, begins_arguments
from lowtide.parsing.tools import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
CHANNEL_MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

FUNCTIONS = "functions."

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def has_channels(tokenizer: Tokenizer) -> bool:
    """Whether a model writes in channels; not all such tokenizers have `<|constrain|>`."""
    return all(tokenizer.token_id(m) is not None for m in CHANNEL_MARKS if m != CONSTRAIN)


class ChannelReader:
    """Reads messages one after the other.

    A call whose arguments are a JSON object is told as it comes; the text of what may be another
    one is held until it is closed.
    """

    def __init__(
        self, out: PieceWriter, tokenizer: Tokenizer, prompt: Sequence[int], tools: Sequence[Tool]
    ) -> None:
        self._out, self._tools = out, {tool.name: tool for tool in tools}
        last, _ = last_mark(tokenizer, prompt, (START, MESSAGE, *ENDS))
        # A template ends with the beginning of a header; a text without any is an answer.
        self._header: list[str] | None = [] if last == START else None
        self._name = ""  # of the function that is being called
        self._opening = ""  # of that message: its header and mark
        self._held = ""  # the message so far, where it is not told
        self._call: StreamedCall | None = None  # that is being told

    def take(self, item: str | Mark) -> None:
        """The next text or mark."""
        if isinstance(item, str):
            self._write(item)
        elif item.text == MESSAGE:
            self._open("".join(self._header or ()))
        elif item.text in ENDS or item.text == START:
            self._close(is_whole=item.text != START)
            self._header = []
        elif self._header is None and item.text == CHANNEL and not self._name:
            self._header = [item.text]
        else:
            self._write(item.text)

    def finish(self) -> None:
        """The answer has ended."""
        self._close(is_whole=False)

    def _write(self, text: str) -> None:
        if self._header is not None:
            self._header.append(text)
        elif self._call is not None:
            self._call.push(text)
        elif self._name:
            self._held += text
            begun = self._held.lstrip()
            if begins_arguments(begun, self._tools.get(self._name)):
                self._call = StreamedCall(self._out, new_call_id(), self._name)
                self._call.push(begun)
        else:
            self._out.write(text)

    def _open(self, header: str) -> None:
        """A message begins, whose header is known."""
        self._header = None
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        name = recipient[1].removeprefix(FUNCTIONS) if recipient and self._tools else ""
        if is_name(name):
            self._name, self._opening = name, header + MESSAGE
        else:
            self._out.turn_to(is_reasoning=channel is not None and channel[1] == "analysis")

    def _close(self, is_whole: bool) -> None:
        """A message ends. What was begun as a call, and is none, is text."""
        name, held, call = self._name, self._held, self._call
        self._name, self._held, self._call = "", "", None
        if not name or call is not None:
            return
        arguments = arguments_text(held, self._tools.get(name)) if is_whole else None
        if arguments is None:
            self._out.turn_to(is_reasoning=False)
            self._out.write(self._opening + held)
        else:
            self._out.call(new_call_id(), name, arguments)
