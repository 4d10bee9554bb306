"""Parse answers of gpt-oss: messages with headers that name a channel and a recipient.

Channel `analysis` is thoughts, and so is a message to one of the model's own tools; a message to a
function is a call; everything else is the answer's text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_form import new_call_id
from lowtide.parsing.call_json import arguments_text, is_name
from lowtide.parsing.marked_text import Item, Mark, Special, last_mark
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.streamed_call import StreamedCall, begin_of_arguments
from lowtide.parsing.tools import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
CHANNEL_MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

FUNCTIONS = "functions."

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def has_channels(tokenizer: Tokenizer) -> bool:
    """Return True if the model writes in channels; not all such tokenizers have `<|constrain|>`."""
    return all(tokenizer.token_id(m) is not None for m in CHANNEL_MARKS if m != CONSTRAIN)


class ChannelReader:
    """Reader of one message after another.

    A message ends where its closing mark is followed by the next message or by nothing; otherwise
    the mark belongs to its text, like every mark inside a string. A call whose arguments are a JSON
    object is streamed; the text of another possible call is held until it is closed.
    """

    def __init__(
        self, out: PieceWriter, tokenizer: Tokenizer, prompt: Sequence[int], tools: Sequence[Tool]
    ) -> None:
        self._out, self._tools = out, {tool.name: tool for tool in tools}
        last, _ = last_mark(tokenizer, prompt, (START, MESSAGE, *ENDS))
        # A template ends with the beginning of a header; a text without any is an answer.
        self._header: list[str] | None = [] if last == START else None
        self._end = ""  # a mark that ends the message, if the next one or nothing follows
        self._name = ""  # of the function that is being called
        self._begin = begin_of_arguments(None)  # of its arguments
        self._opening = ""  # of that message: its header and mark
        self._held = ""  # the message so far, if it is not streamed
        self._call: StreamedCall | None = None  # being streamed

    def take(self, item: Item) -> None:
        """Take the next text or mark."""
        mark = item.text if isinstance(item, Mark) else ""
        end, self._end = self._end, ""
        if self._header is not None:
            self._in_header(item)
        elif mark == START and not self._is_string:
            self._close(is_whole=end != "")
            self._header = []
        else:
            self._write(end)
            if mark in ENDS:
                self._end = mark
            elif not end and mark == CHANNEL and not self._name:
                self._header = [CHANNEL]
            elif not isinstance(item, Special) or self._name:
                self._write(item if isinstance(item, str) else item.text)

    def finish(self, is_cut: bool = False) -> None:
        """End the answer."""
        self._close(is_whole=self._end != "")

    @property
    def _is_string(self) -> bool:
        return self._call is not None and self._call.is_string

    def _in_header(self, item: Item) -> None:
        header = self._header or []
        if isinstance(item, Mark) and item.text == MESSAGE:
            self._open("".join(header))
        elif isinstance(item, Mark) and item.text in (START, *ENDS):
            self._header = []
        elif not isinstance(item, Special):
            header.append(item if isinstance(item, str) else item.text)
            self._header = header

    def _write(self, text: str) -> None:
        if self._call is not None:
            self._call.push(text)
        elif self._name:
            self._held += text
            begun = self._held.lstrip()
            if self._begin.match(begun):
                self._call = StreamedCall(self._out, new_call_id(), self._name)
                self._call.push(begun)
        elif text:
            self._out.write(text)

    def _open(self, header: str) -> None:
        """Begin a message whose header is known; of two channels the last counts."""
        self._header = None
        recipient, channels = _RECIPIENT.search(header), _CHANNEL.findall(header)
        name = self._function(recipient[1]) if recipient else ""
        if name and self._tools:
            self._name, self._opening = name, header + MESSAGE
            self._begin = begin_of_arguments(self._tools.get(name))
        else:
            is_to_others = recipient is not None and not name and recipient[1] != "assistant"
            is_analysis = channels[-1:] == ["analysis"]
            self._out.turn_to(is_reasoning=is_analysis or is_to_others)

    def _function(self, recipient: str) -> str:
        """Return the function that a message is sent to, or ""."""
        name = recipient.removeprefix(FUNCTIONS)
        is_function = name != recipient or name in self._tools
        return name if is_function and is_name(name) else ""

    def _close(self, is_whole: bool) -> None:
        """End a message; an incomplete call becomes text."""
        name, held, call = self._name, self._held, self._call
        self._name, self._held, self._call, self._end = "", "", None, ""
        if not name or call is not None:
            return
        if not is_whole:
            self._out.turn_to(is_reasoning=False)
            self._out.write(self._opening + held)
            return
        # Invalid JSON is passed on unchanged: the client reports it to the model.
        arguments = arguments_text(held, self._tools.get(name))
        self._out.call(new_call_id(), name, held if arguments is None else arguments)
