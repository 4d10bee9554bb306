"""llama.cpp's tests of what models write: each answer is read here, whole and token by token.

Of the templates whose calls lowtide reads. Blanks at the ends of texts are not compared, as in the
tests themselves.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from peer_cpp import Made, Name, Reader, Unread

from lowtide.errors import LowtideError
from lowtide.model_folder.chat_template import ChatTemplates
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.model_writing.synth_tokenizer import tokenizer_json
from lowtide.parsing import parser_of
from lowtide.parsing.pieces import CallArguments, CallBegun, Piece, Reasoning, Text, joined
from lowtide.parsing.tools import Tool

TEMPLATES = {
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "GLM-4.6",
    "GLM-4.7-Flash",
    "google-gemma-4-31B-it",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "LFM2-8B-A1B",
    "LFM2.5-8B-A1B",
    "LFM2.5-Instruct",
    "MiniMax-M2",
    "moonshotai-Kimi-K2",
    "poolside-Laguna-XS.2",
    "Spark2.5",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "llama-cpp-deepseek-r1",
    "MiMo-VL",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "openai-gpt-oss-120b",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-QwQ-32B",
    "Qwen3-Coder",
    "Qwen3.5-4B",
    "StepFun3.5-Flash",
    "unsloth-mistral-Devstral-Small-2507",
}
"""Templates of families that run here, and of others that write calls as they do."""

KNOWN = {
    ("Qwen3.5-4B", "<think>\n\n</think>"): "a second mark is no word of the thoughts, as in vLLM",
    ("mistralai-Mistral-Nemo", '"id": "123456789"'): "the call is told before its id: a new one, "
    "as in vLLM",
    ("openai-gpt-oss", "to=container.exec"): "to the model's own tools: thoughts, as in vLLM",
    ("openai-gpt-oss", "to=python "): "to the model's own tools: thoughts, as in vLLM",
}
"""Differences that stay, by the beginning of a template's name and a part of the answer: why."""

_EOS = 300
_MARKS = re.compile(
    r"<\|[a-z_0-9\"]+\|?>|<[a-z_]+\|>|</?minimax:tool_call>|<｜[^｜<>\s]+｜>|</?think>|</?tool_call>|\[(?:TOOL_CALLS|ARGS|CALL_ID)\]"
)
_SPECIAL = re.compile(r"<\||<｜(?!tool)|\[")
_TEST = re.compile(r"\btst\w*\.test|peg_tester\(|for \(const auto & path :")
_DEFINED = re.compile(
    r"(?:(?:static|const) common_chat_(?:msg|tool)|auto)\s+(?P<name>\w+)\s*(?:=\s*)?"
    r"(?=[\w{])(?!peg_tester|read_)"
)
_TEXT = re.compile(r"(?:const )?(?:static )?std::string\s+(\w+)\s*=\s*(?=R?\")")


class Message(NamedTuple):
    """Parsed answer; calls: names, arguments and ids."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()


class Case(NamedTuple):
    """One test. settings: what is asked besides, by the name of its call."""

    template: str
    text: str
    expected: Message
    settings: dict[str, Any]


def run(llama: Path) -> int:
    """Print each difference and a sum; return 1 where one is not known."""
    text = (llama / "tests" / "test-chat.cpp").read_text(encoding="utf-8")
    counts: Counter[str] = Counter()
    for case in _cases(text):
        if isinstance(case, str):
            counts["not read"] += 1
            print("not read:", case)
            continue
        if case.template not in TEMPLATES:
            counts["other families"] += 1
            continue
        reason = _left_out(case)
        if reason:
            counts[f"left out: {reason}"] += 1
            continue
        found = _answers(llama, case)
        known = any(case.template.startswith(name) and part in case.text for name, part in KNOWN)
        is_same = all(_is_same(case, one) for one in found)
        counts["same" if is_same else "known" if known else "different"] += 1
        if not is_same and not known:
            print(f"{case.template}: {case.text!r}\n  expected {case.expected}")
            print("\n".join(f"  found    {one}" for one in dict.fromkeys(found)))
    for what, num in sorted(counts.items()):
        print(f"{num:5} {what}")
    return int(counts["different"] > 0 or counts["not read"] > 0)


def _left_out(case: Case) -> str:
    """Why a test asks for nothing that is here."""
    continued = case.settings.get("continue_final_message")
    if continued is not None and "REASONING" in continued[0].name:
        return "begun thoughts are not continued"
    format = case.settings.get("reasoning_format")
    is_told_apart = format is not None and not format[0].name.endswith("_NONE")
    if not is_told_apart and re.search(
        r"</?think>|<\|channel\|>analysis|<\|channel>thought", case.text
    ):
        return "thoughts are always told apart"
    return ""


def _answers(llama: Path, case: Case) -> list[Message]:
    """The answer read whole and token by token."""
    source = (llama / "models" / "templates" / f"{case.template}.jinja").read_text("utf-8")
    tools = [_tool(each) for each in case.settings.get("tools", [Made("", [])])[0].parts]
    tokenizer = _tokenizer(source)
    messages = [{"role": "user", "content": "Hey there!"}]
    if "continue_final_message" in case.settings:
        messages.append({"role": "assistant", "content": "Hello, "})
    options: dict[str, object] = {"enable_thinking": True}
    if "enable_thinking" in case.settings:
        options["enable_thinking"] = case.settings["enable_thinking"][0] == Name("true")
    if tools and tokenizer.template_names("tools"):
        options["tools"] = [tool.declaration() for tool in tools]
    try:
        prompt = tokenizer.encode_chat(messages, options)
    except LowtideError:  # the suite of templates tells of it
        prompt = []
    ids = tokenizer.encode(case.text, add_special=False)
    found = []
    for step in (len(ids) or 1, 1):
        parser = parser_of(tokenizer, prompt, tools)
        pieces = [p for i in range(0, len(ids), step) for p in parser.feed(ids[i : i + step])]
        pieces += parser.finish(is_cut="is_partial" in case.settings)
        found.append(_message(pieces))
    return found


def _tokenizer(template: str) -> Tokenizer:
    """Bytes, and the marks of a template as tokens."""
    marks = sorted(set(_MARKS.findall(template)))
    if "<|channel|>" in marks:
        marks = sorted({*marks, "<|constrain|>", "<|call|>", "<|return|>"})
    if "<｜tool▁calls▁begin｜>" in marks:
        marks = sorted({*marks, "<think>", "</think>", "<｜tool▁sep｜>"})
    backend = tokenizers.Tokenizer.from_str(tokenizer_json(_EOS))
    backend.add_tokens(
        [tokenizers.AddedToken(m, normalized=False) for m in marks if not _SPECIAL.match(m)]
    )
    backend.add_special_tokens([mark for mark in marks if _SPECIAL.match(mark)])
    config = {"eos_token": "<|endoftext|>", "bos_token": ""}
    return Tokenizer(backend, config, ChatTemplates(template))


def _message(pieces: list[Piece]) -> Message:
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            calls.append([piece.name, "", piece.id])
        elif isinstance(piece, CallArguments):
            calls[piece.index][1] += piece.text
    told = tuple((name, arguments, call_id) for name, arguments, call_id in calls)
    return Message(joined(pieces, Text), joined(pieces, Reasoning), told)


def _is_same(case: Case, found: Message) -> bool:
    expected = case.expected
    if "continue_final_message" in case.settings:  # what was begun is the client's already
        expected = Message(expected.content.removeprefix("Hello, "))
    if len(expected.calls) != len(found.calls):
        return False
    for (name, arguments, call_id), one in zip(expected.calls, found.calls, strict=True):
        is_id = "mistral" in case.template.lower() and len(call_id) == 9
        if one[0] != name or _value(one[1]) != _value(arguments) or is_id and one[2] != call_id:
            return False
    texts = (expected.content.strip(), expected.reasoning.strip())
    return texts == (found.content.strip(), found.reasoning.strip())


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _cases(text: str) -> Iterator[Case | str]:
    """The tests, or what of one could not be read."""
    defined = _definitions(text)
    templates: list[str] = []
    listed: list[str] = []
    for found in _TEST.finditer(text, text.index("static void test_template_output_peg_parsers")):
        try:
            if found[0].startswith("for"):
                listed = Reader(text, found.end()).expression().parts
            elif found[0].startswith("peg"):
                path = Reader(text, found.end() - 1).arguments()[0]
                templates = listed if path == Name("path") else [path]
            else:
                reader = Reader(text, found.end())
                given = [_resolved(one, defined) for one in reader.arguments()][0]
                settings = {
                    name: [_resolved(one, defined) for one in parts]
                    for name, parts in reader.chain()
                }
                for template in templates:
                    yield Case(Path(template).stem, given, _expected(settings), settings)
        except (Unread, AttributeError, TypeError, IndexError, KeyError) as error:
            if any(Path(str(t)).stem in TEMPLATES for t in templates):
                line = text.count("\n", 0, found.start()) + 1
                yield f"line {line}: {type(error).__name__} {error}"


def _definitions(text: str) -> dict[str, Any]:
    """Messages, tools and texts that have names."""
    defined: dict[str, Any] = {}
    for found in _DEFINED.finditer(text):
        try:
            defined[found["name"]] = Reader(text, found.end()).expression()
        except Unread:
            continue
    for found in _TEXT.finditer(text):
        try:
            defined[found[1]] = Reader(text, found.end()).expression()
        except Unread:
            continue
    return defined


def _resolved(value: Any, defined: dict[str, Any]) -> Any:
    """A value whose names are replaced by what they are of."""
    if isinstance(value, Name):
        return _resolved(defined[value.name], defined) if value.name in defined else value
    if isinstance(value, Made):
        return Made(value.name, [_resolved(part, defined) for part in value.parts])
    return value


def _tool(made: Made) -> Tool:
    name, description, parameters = made.parts
    return Tool(name, description, json.loads(parameters))


def _expected(settings: dict[str, Any]) -> Message:
    message = _made_message(settings["expect"][0]) if "expect" in settings else Message()
    if "expect_content" in settings:
        message = message._replace(content=settings["expect_content"][0])
    if "expect_reasoning" in settings:
        message = message._replace(reasoning=settings["expect_reasoning"][0])
    if "expect_tool_calls" in settings:
        calls = [_texts(made.parts, 3) for made in settings["expect_tool_calls"][0].parts]
        message = message._replace(calls=tuple((c[0], c[1], c[2]) for c in calls))
    return message


def _made_message(made: Made) -> Message:
    """Return the message that one of the tests' functions makes."""
    if made.name == "simple_assist_msg":
        content, reasoning, name, arguments, call_id = _texts(made.parts, 5)
        calls = ((name, arguments, call_id),) if name or call_id else ()
        return Message(content, reasoning, calls)
    if made.name == "message_with_tool_calls":
        name, arguments = made.parts
        return Message("", "", ((name, arguments, ""),))
    if made.name == "message_with_content_and_tool_call":
        content, name, arguments = made.parts
        return Message(content, "", ((name, arguments, ""),))
    if made.name == "message_with_tool_calls_and_reasoning":
        name, arguments, reasoning = made.parts
        return Message("", reasoning, ((name, arguments, ""),))
    if made.name == "message_with_reasoning_and_tool_call":
        reasoning, name, arguments = made.parts
        return Message("", reasoning, ((name, arguments, ""),))
    if made.name == "message_with_reasoning_content_and_multiple_tool_calls":
        reasoning, content, calls = made.parts
        told = tuple((one.parts[0], one.parts[1], "") for one in calls.parts)
        return Message(content, reasoning, told)
    raise Unread(f"a message of {made.name or made.parts!r}")


def _texts(parts: list[Any], num: int) -> list[str]:
    """Return `num` texts; one that is left out, or an empty list, is ""."""
    texts = [part if isinstance(part, str) else "" for part in parts]
    return [*texts, *[""] * (num - len(texts))]
