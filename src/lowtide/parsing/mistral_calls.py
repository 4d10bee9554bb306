"""Mistral's forms of calls."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_form import JSON_HEAD, CallForm, literal
from lowtide.parsing.call_json import NAME, Call, arguments_text, call_of, is_name, parsed
from lowtide.parsing.tools import Tool

_MISTRAL_ID = re.compile(r"[0-9A-Za-z]{9}")


class MistralCalls(CallForm):
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls.

    Newer models write `[TOOL_CALLS]NAME[ARGS]{...}` for each call.
    """

    begin = "[TOOL_CALLS]"
    arguments, call_id = "[ARGS]", "[CALL_ID]"
    ends = {begin: ""}
    inner = (arguments, call_id)
    head = re.compile(
        rf"(?:\[TOOL_CALLS\]\s*\[?)?{JSON_HEAD}"
        rf"|\[TOOL_CALLS\]\s*({NAME})\s*(?:\[CALL_ID\]\s*(?P<id>\w*)\s*)?(?:\[ARGS\]\s*)?(?=\{{)"
    )
    json_begin = re.compile(r"(?:\[TOOL_CALLS\]\s*|\s*(?!\[TOOL_CALLS\]))([\[{])")
    may_end_open = True  # JSON has its own end
    _no_call = re.compile(
        rf"\[TOOL_CALLS\](?!\s*(?:\Z|[\[{{]|{NAME}\s*(?:\Z|\{{|\[(?:\Z|A\Z|AR|C\Z|CA))))"
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._ids: set[str] = set()  # of this answer

    def new_id(self, written: str | None = None) -> str:
        """Make an id of nine letters and digits, the only form that the templates accept."""
        if written is None or not _MISTRAL_ID.fullmatch(written) or written in self._ids:
            letters = string.ascii_letters + string.digits
            written = "".join(secrets.choice(letters) for _ in range(9))
        self._ids.add(written)
        return written

    def is_no_call(self, held: str) -> bool:
        return self._no_call.match(held) is not None

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[Call] | None:
        body = text.removeprefix(self.begin).strip()
        if body[:1] in ("[", "{"):
            value = parsed(body)
            values = value if isinstance(value, list) else [value]
            calls = [call_of(each, tools) for each in values]
            return None if None in calls else [call for call in calls if call is not None]
        name, separator, rest = body.partition(self.arguments)
        name = name.partition(self.call_id)[0].strip()
        arguments = arguments_text(rest, tools.get(name))
        if not separator or not is_name(name) or arguments is None:
            return None
        return [Call(name, arguments)]

    def one(self, tool: Tool, arguments: str) -> str:
        if self._has_arguments_mark:
            return (
                f"{self.mark(self.begin)} {literal(tool.name)} {self.mark(self.arguments)} "
                f"{arguments}"
            )
        head = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        return f"{head} {arguments} {literal('}')}"

    def several(self, one: str, is_single: bool) -> str:
        if self._has_arguments_mark:
            return one if is_single else f"({one})+"
        more = "" if is_single else f'(", " {one})*'
        return f'{self.mark(self.begin)} "[" {one} {more} "]"'

    @property
    def _has_arguments_mark(self) -> bool:
        return self._tokenizer.token_id(self.arguments) is not None
