"""Chat templates of published models, as transformers and llama.cpp render them."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cpp_values import calls_of
from transformers.utils.chat_template_utils import render_jinja_template

from lowtide.errors import LowtideError, UnsupportedError
from lowtide.model_folder.chat_template import ChatTemplates
from lowtide.model_folder.template_worker import render

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Which one."}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "time")
]


class Case(NamedTuple):
    """A conversation that both get. is_begun: its last answer is continued."""

    messages: list[dict[str, Any]]
    options: Mapping[str, Any] = {}
    is_begun: bool = False


def _user(text: str = "Hello, <b>you</b>") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str = "Hi there", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _called(*names: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "id": f"call0000{i}",
            "function": {"name": name, "arguments": {"city": "Z\u00fcrich", "days": [1, None]}},
        }
        for i, name in enumerate(names)
    ]


def _result(number: int, name: str) -> dict[str, Any]:
    call_id = f"call0000{number}"
    return {"role": "tool", "content": '{"ok": true}', "tool_call_id": call_id, "name": name}


SYSTEM = {"role": "system", "content": "Be brief."}
WITH_TOOLS = {"tools": TOOLS}
ONE = [_answer("", tool_calls=_called("weather")), _result(0, "weather")]
TWO = [
    _answer("", tool_calls=_called("weather", "time")),
    _result(0, "weather"),
    _result(1, "time"),
]
THOUGHT = {"reasoning_content": "Hm."}

CASES = {
    "a question": Case([_user()]),
    "a system turn": Case([SYSTEM, _user()]),
    "two turns": Case([SYSTEM, _user(), _answer("  Hi  "), _user("And now?")]),
    "thoughts": Case([_user(), _answer(**THOUGHT), _user("And now?")]),
    "no thinking": Case([_user()], {"enable_thinking": False}),
    "thinking": Case([_user()], {"enable_thinking": True}),
    "tools": Case([_user()], WITH_TOOLS),
    "tools and a system turn": Case([SYSTEM, _user()], WITH_TOOLS),
    "a call": Case([_user(), *ONE], WITH_TOOLS),
    "a call that was answered": Case([_user(), *ONE, _answer(), _user("More?")], WITH_TOOLS),
    "two calls": Case([SYSTEM, _user(), *TWO], WITH_TOOLS),
    "a call behind thoughts": Case(
        [_user(), _answer("", tool_calls=_called("weather"), **THOUGHT), _result(0, "weather")],
        WITH_TOOLS,
    ),
    "a call behind words": Case(
        [_user(), _answer("Look.", tool_calls=_called("weather")), _result(0, "weather")],
        WITH_TOOLS,
    ),
    "an answer that is begun": Case([_user(), _answer("I say")], is_begun=True),
}

NO_TOOLS = "known: lowtide refuses tools that the template would leave out without a word"
"""llama.cpp warns of them, and shows some by a form of its own."""


def run(llama: Path) -> int:
    """1 where there is a difference without a known reason, else 0."""
    counts: Counter[str] = Counter()
    for path in sorted((llama / "models" / "templates").glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        for name, case in CASES.items():
            _count(counts, path.stem, name, _compared(template, case))
    for name, template, case, special, expected in _llama_cases(llama):
        _count(counts, name, "llama.cpp's", _as_llama(template, case, special, expected))
    source = (llama / "tests" / "test-jinja.cpp").read_text(encoding="utf-8")
    for name, template, variables, expected in calls_of(source, "test_template"):
        _count(counts, name, "Jinja", _as_jinja(template, dict(variables), expected))
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return int(bool(counts["different"]))


def _count(counts: Counter[str], template: str, case: str, found: str) -> None:
    """found: empty where both are the same, else what differs, after a word for its kind."""
    counts[found.partition(":")[0] or "same"] += 1
    if found:
        print(f"{template} | {case} | {found}")


def _compared(template: str, case: Case) -> str:
    theirs = [_theirs(template, case, is_text) for is_text in (False, True)]
    try:
        ours = ChatTemplates(template).render(case.messages, {**SPECIAL, **case.options})
    except LowtideError as error:
        if theirs == [None, None]:
            return "refused by both"
        return NO_TOOLS if isinstance(error, UnsupportedError) else f"different: {error}"
    if ours in theirs:
        return ""
    if theirs == [None, None]:
        return "taken by lowtide alone"
    return f"different: {_first_difference(ours, next(t for t in theirs if t is not None))}"


def _theirs(template: str, case: Case, is_text: bool) -> str | None:
    """Render a case as transformers does; return None where it refuses.

    is_text: arguments are JSON, as OpenAI's clients send them, and not objects, as transformers'
    pages have them.
    """
    messages = json.loads(json.dumps(case.messages))
    for message in messages:
        for call in message.get("tool_calls", ()):
            if is_text:
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    try:
        [text], _ = render_jinja_template(
            [messages],
            chat_template=template,
            add_generation_prompt=not case.is_begun,
            continue_final_message=case.is_begun,
            **{**SPECIAL, **case.options},
        )
    except Exception:  # a template raises what it likes
        return None
    return str(text)


def _first_difference(ours: str, theirs: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
    place = min(len(ours), len(theirs)) if place < 0 else place
    return (
        f"{ours[max(0, place - 30) : place + 60]!r} for {theirs[max(0, place - 30) : place + 60]!r}"
    )


_SAID = [
    SYSTEM | {"content": "You are a helpful assistant"},
    _user("Hello"),
    _answer("Hi there"),
    _user("Who are you"),
    _answer("   I am an assistant   "),
    _user("Another question"),
]
_FIELD = re.compile(r"/\* \.(\w+)=? ?\*/\s*((?:U8C\()?(?:u8)?\"(?:[^\"\\]|\\.)*\"\)?|\w+)")


def _llama_cases(
    llama: Path,
) -> Iterator[tuple[str, str, Case, Mapping[str, str], str]]:
    """Yield the cases of llama.cpp's test-chat-template.cpp.

    Each has its name, template, conversation, special tokens and rendered text.
    """
    source = (llama / "tests" / "test-chat-template.cpp").read_text(encoding="utf-8")
    body = source[source.index("std::vector<TestCase> test_cases") :]
    for entry in re.split(r"/\* \.name=? ?\*/", body)[1:]:
        fields = {name: _literal(value) for name, value in _FIELD.findall(f"/* .name= */{entry}")}
        if fields.get("supported_with_jinja") == "false" or "extra_conversation" in entry:
            continue
        expected = fields.get("expected_output_jinja") or fields["expected_output"]
        special = {name: fields.get(name, "") for name in SPECIAL}
        yield fields["name"], fields["template_str"], Case(_SAID), special, expected


def _literal(text: str) -> str:
    text = text.removeprefix("U8C(").removesuffix(")").removeprefix("u8")
    return str(ast.literal_eval(text)) if text.startswith('"') else text


def _as_llama(template: str, case: Case, special: Mapping[str, str], expected: str) -> str:
    try:
        ours = ChatTemplates(template).render(case.messages, special)
    except LowtideError as error:
        return f"different: {error}"
    return "" if ours == expected else f"different: {_first_difference(ours, expected)}"


def _as_jinja(template: str, variables: dict[str, Any], expected: str) -> str:
    try:
        ours = render(template, variables, 1 << 20)
    except Exception as error:  # as the process that renders them would tell
        return f"different: {error}"
    return "" if ours == expected else f"different: {_first_difference(ours, expected)}"
