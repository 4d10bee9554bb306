"""Reading of an answer's tokens: text, thoughts and tool calls, in every published form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import (
    CODER,
    DEEPSEEK,
    DEEPSEEK_31,
    FORMATS,
    GPT_OSS,
    HELD,
    INLINE,
    MISTRAL,
    OLD_MISTRAL,
    PLAIN,
    QWEN,
    THINK,
    CallFormat,
    make_tokenizer,
)

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing import has_thoughts, parser_of
from lowtide.parsing.call_forms import call_form_of
from lowtide.parsing.channels import CHANNEL_MARKS, ChannelReader
from lowtide.parsing.inline_calls import InlineReader
from lowtide.parsing.marked_text import Mark, MarkedText
from lowtide.parsing.piece_writer import PieceWriter
from lowtide.parsing.pieces import CallArguments, CallBegun, Piece, Reasoning, Text
from lowtide.parsing.tools import Tool

WEATHER = Tool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "places": {"type": "array"},
        },
    },
)
PATCH = Tool("apply_patch", "", {"properties": {"input": {"type": "string"}}})
TOOLS = (WEATHER, PATCH)
ARGUMENTS: dict[str, object] = {"city": 'Zürich "Nord"\n8001', "days": 3, "places": [{"a": None}]}
CALL = ("get_weather", ARGUMENTS)

IN_JSON = tuple(form for form in FORMATS if form not in HELD)
named = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def told(pieces: Iterable[Piece]) -> list[tuple[str, ...]]:
    """Pieces joined: what a client has at the end, whatever the division."""
    found: list[tuple[str, ...]] = []
    for piece in pieces:
        if isinstance(piece, Text | Reasoning):
            kind = type(piece).__name__
            if found and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1] + piece.text)
            else:
                found.append((kind, piece.text))
        elif isinstance(piece, CallBegun):
            assert piece.index == sum(kind == "call" for kind, *_ in found)
            found.append(("call", piece.name, ""))
        else:
            assert isinstance(piece, CallArguments)
            kind, name, arguments = found[-1]
            found[-1] = (kind, name, arguments + piece.text)
    return found


def read_ids(
    tokenizer: Tokenizer,
    parts: Iterable[Sequence[int]],
    tools: Sequence[Tool] = TOOLS,
    prompt: str = "",
) -> list[tuple[str, ...]]:
    parser = parser_of(tokenizer, tokenizer.encode(prompt), tools)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return told([*pieces, *parser.finish()])


def read(
    tokenizer: Tokenizer, text: str, tools: Sequence[Tool] = TOOLS, prompt: str = "", step: int = 1
) -> list[tuple[str, ...]]:
    ids = tokenizer.encode(text)
    parts = [ids[start : start + step] for start in range(0, len(ids), step)]
    return read_ids(tokenizer, parts, tools, prompt)


def as_told(name: str, arguments: dict[str, object]) -> tuple[str, ...]:
    return ("call", name, json.dumps(arguments, ensure_ascii=False))


@named
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_call_is_read_in_every_form(form: CallFormat, step: int) -> None:
    text = form.text(CALL)
    assert read(form.tokenizer, text, prompt=form.prompt, step=step) == [as_told(*CALL)]


@pytest.mark.parametrize("form", INLINE, ids=lambda form: form.name)
def test_several_calls_behind_a_text(form: CallFormat) -> None:
    calls = (CALL, ("get_weather", {"city": "Bern"}), ("apply_patch", {"input": "*** \n+a"}))
    found = read(form.tokenizer, "Let me see.\n\n" + form.text(*calls), prompt=form.prompt)
    assert found == [("Text", "Let me see."), *(as_told(*call) for call in calls)]


@named
def test_without_tools_marks_are_plain_text(form: CallFormat) -> None:
    text = "so: " + form.text(CALL)
    [(kind, found)] = read(form.tokenizer, text, (), form.prompt.replace("<|start|>assistant", ""))
    assert kind == "Text"
    if form is not GPT_OSS:
        assert found == text
    assert json.dumps(ARGUMENTS["days"]) in found


@named
def test_a_call_that_is_cut_short_is_told_as_far_as_it_goes(form: CallFormat) -> None:
    text, (_, name, arguments) = form.text(CALL), as_told(*CALL)
    cut = text[: text.rindex("8001")]
    found = read(form.tokenizer, cut, prompt=form.prompt)
    expected = ("call", name, arguments[: arguments.rindex("8001")])
    assert found == [("Text", cut) if form in HELD else expected]


@pytest.mark.parametrize("form", IN_JSON, ids=lambda form: form.name)
def test_arguments_are_told_while_they_are_written(form: CallFormat) -> None:
    text, (_, name, arguments) = form.text(CALL), as_told(*CALL)
    parser = parser_of(form.tokenizer, form.tokenizer.encode(form.prompt), TOOLS)
    begun = told(parser.feed(form.tokenizer.encode(text[: text.index("Nord")])))
    assert begun == [("call", name, arguments[: arguments.index("Nord")])]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": }',
        '{"days": NaN}',
        '{"days":1 ,\n"days": 2}',
        '{"city": "a\nb"}',
        r'{"city": "}\"{", "places": [{"a": "\\"}]}',
    ],
)
def test_arguments_are_told_to_the_letter(arguments: str) -> None:
    for form in (QWEN, PLAIN, CODER):
        written = f'{{"name": "get_weather", "arguments": {arguments}}}'
        found = read(form.tokenizer, f"see <tool_call>{written}</tool_call>, that is it")
        call = ("call", "get_weather", arguments)
        assert found == [("Text", "see"), call, ("Text", ", that is it")]
    text = f"<|channel|>commentary to=functions.get_weather<|message|>\n{arguments} <|call|>"
    expected = ("call", "get_weather", arguments)
    assert read(GPT_OSS.tokenizer, text, prompt=GPT_OSS.prompt) == [expected]


def test_what_stands_behind_the_arguments_is_no_text() -> None:
    more = '{"name": "f", "arguments": {"a": 1}, "id": "}", "more": {}}}\n'
    assert read(QWEN.tokenizer, f"<tool_call>{more}</tool_call>") == [as_told("f", {"a": 1})]
    unclosed = '<tool_call>{"name": "f", "arguments": {}}\n\nDone.'
    assert read(QWEN.tokenizer, unclosed) == [as_told("f", {}), ("Text", "Done.")]
    again = '<tool_call>{"name": "f", "arguments": {}}\n' * 2
    assert read(QWEN.tokenizer, again) == [as_told("f", {})] * 2
    several = '[{"name": "f", "arguments": {}, "id": "x"} , {"name": "g", "arguments": {"b": "]"}}]'
    expected = [as_told("f", {}), as_told("g", {"b": "]"})]
    assert read(OLD_MISTRAL.tokenizer, f"[TOOL_CALLS] {several}") == expected


def test_a_call_in_another_form_behind_one_in_json() -> None:
    begin, end, one_begin, one_end, separator = DEEPSEEK
    other = f"{one_begin}apply_patch{separator}*** \n+a{one_end}"
    none = f"{one_begin}get_weather{separator}[1]{one_end}"
    first = f"{begin}{DEEPSEEK_31.one('get_weather', {'days': 1})}\n"
    call = as_told("get_weather", {"days": 1})
    expected = [call, as_told("apply_patch", {"input": "*** \n+a"})]
    assert read(DEEPSEEK_31.tokenizer, first + other + end) == expected
    assert read(DEEPSEEK_31.tokenizer, first + none + end) == [call, ("Text", none + end)]
    cut = first[: first.index("1}")] + one_end + other
    expected[0] = ("call", "get_weather", '{"days": ')
    assert read(DEEPSEEK_31.tokenizer, cut + end) == expected


@pytest.mark.parametrize(
    "body",
    [
        "",
        "get_weather",
        '{"name": "get_weather", "arguments": [1]}',
        '{"name": 3, "arguments": {}}',
        '{"name": "a b", "arguments": {}}',
        '{"arguments": {}}',
        '[{"name": "get_weather"}]',
        "[" * 5_000,
        "<function=get_weather>city</function>",
        "<function=get_weather>",
    ],
)
def test_what_only_looks_like_a_call_is_text(body: str) -> None:
    for form in (QWEN, PLAIN, CODER):
        text = f"see <tool_call>{body}</tool_call>, that is it"
        assert read(form.tokenizer, text, step=100_000) == [("Text", text)]


def test_other_words_for_the_same_call() -> None:
    for body in (
        '{"name": "get_weather", "parameters": {"days": 1}}',
        '{"arguments": "{\\"days\\": 1}", "name": "get_weather"}',
        "<function=get_weather>\n<parameter=days>\n1\n</parameter>\n</function>",
    ):
        text = f"<tool_call>\n{body}\n</tool_call>"
        assert read(QWEN.tokenizer, text) == [as_told("get_weather", {"days": 1})]
    assert read(QWEN.tokenizer, '<tool_call>{"name": "f"}</tool_call>') == [as_told("f", {})]


def test_half_a_surrogate_pair_stays_escaped() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800é"}}</tool_call>'
    [(_, _, arguments)] = read(QWEN.tokenizer, text)
    assert arguments == '{"a": "\\ud800é"}'


def test_values_in_xml_have_their_schema_s_type() -> None:
    def call(**values: str) -> str:
        lines = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return f"<tool_call>\n<function=get_weather>\n{lines}</function>\n</tool_call>"

    [(_, _, arguments)] = read(
        CODER.tokenizer, call(city="12", days="12", units="null", places="[1]", other="x")
    )
    expected = {"city": "12", "days": 12, "units": None, "places": [1], "other": "x"}
    assert json.loads(arguments) == expected
    code = "def f():\n\n    return '</parameter>'\n"
    [(_, _, arguments)] = read(CODER.tokenizer, call(city=code, units="7"))
    assert json.loads(arguments) == {"city": code, "units": "7"}


def test_types_in_a_schema_that_are_none() -> None:
    odd = {"a": {"type": {}}, "b": {"type": [[], "integer"], "anyOf": [{"type": {}}, 3]}}
    tool = Tool("f", "", {"properties": odd})
    values = "".join(f"<parameter={key}>\n1\n</parameter>\n" for key in odd)
    text = f"<function=f>\n{values}</function>"
    assert read(CODER.tokenizer, text, (tool,)) == [as_told("f", {"a": 1, "b": 1})]


def test_a_call_of_xml_whose_first_mark_is_missing() -> None:
    text = (
        "Now.\n<function=get_weather>\n<parameter=days>\n1\n</parameter>\n</function>\n</tool_call>"
    )
    expected = [("Text", "Now."), as_told("get_weather", {"days": 1})]
    assert read(CODER.tokenizer, text) == expected
    assert read(QWEN.tokenizer, text) == [("Text", text)]


def test_mistral_s_ids_and_others() -> None:
    ids = {}
    for form in FORMATS:
        parser = parser_of(form.tokenizer, form.tokenizer.encode(form.prompt), TOOLS)
        text = form.text(CALL) + form.text(CALL)
        pieces = [*parser.feed(form.tokenizer.encode(text)), *parser.finish()]
        ids[form.name] = [piece.id for piece in pieces if isinstance(piece, CallBegun)]
        assert len(set(ids[form.name])) == len(ids[form.name])
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", one) for one in ids["qwen"])
    assert all(re.fullmatch(r"[0-9A-Za-z]{9}", one) for one in ids["mistral"])
    assert len(ids["qwen"]) == len(ids["mistral"]) == 2


def test_mistral_s_call_has_an_id_of_its_own() -> None:
    text = "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{}"
    assert read(MISTRAL.tokenizer, text) == [as_told("get_weather", {})]


@pytest.mark.parametrize("text", ["[TOOL_CALLS]get_weather", "[TOOL_CALLS][{}]", "[TOOL_CALLS]"])
def test_mistral_s_marks_without_a_call(text: str) -> None:
    for form in (MISTRAL, OLD_MISTRAL):
        assert read(form.tokenizer, text) == [("Text", text)]


def test_deepseek_s_marks_without_a_call() -> None:
    form = FORMATS[3]
    for inside in ("", "f", f"{DEEPSEEK[2]}f{DEEPSEEK[4]}[1]{DEEPSEEK[3]}", f"x{DEEPSEEK[2]}"):
        text = DEEPSEEK[0] + inside + DEEPSEEK[1]
        assert read(form.tokenizer, text) == [("Text", text)]


# thoughts


@pytest.mark.parametrize("prompt", ["", "q<think>\n"])
def test_thoughts_come_apart_and_without_the_lines_around_them(prompt: str) -> None:
    begin = "" if prompt else "<think>"
    text = f"{begin}\nhm <tool_call>{{}}</tool_call>\n\n</think>\n\nYes.\n\n{QWEN.text(CALL)}"
    found = read(QWEN.tokenizer, text, prompt=prompt)
    thoughts = "hm <tool_call>{}</tool_call>"
    assert found == [("Reasoning", thoughts), ("Text", "Yes."), as_told(*CALL)]
    parser = parser_of(QWEN.tokenizer, QWEN.tokenizer.encode(prompt), TOOLS)
    ids = QWEN.tokenizer.encode(text)
    parser.feed(ids)
    mark = QWEN.tokenizer.token_id("</think>")
    assert parser.num_reasoning == ids.index(mark)


def test_no_thoughts_are_no_piece() -> None:
    assert read(QWEN.tokenizer, "<think>\n\n</think>\n\nYes.\n") == [("Text", "Yes.\n")]


def test_a_mark_that_a_user_wrote_begins_no_thoughts() -> None:
    prompt = "what is <think> for?<|role_end|>"
    assert read(QWEN.tokenizer, "It", prompt=prompt) == [("Text", "It")]
    closed = "<think>a</think>b"
    assert read(QWEN.tokenizer, "It", prompt=closed) == [("Text", "It")]
    assert not has_thoughts(PLAIN.tokenizer) and has_thoughts(GPT_OSS.tokenizer)
    only_one = make_tokenizer(("<think>",))
    assert read(only_one, "It", prompt="<think>") == [("Text", "It")]


def test_channels_of_gpt_oss() -> None:
    text = (
        "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
        '<|constrain|>json<|message|>{"days":1}<|call|>'
    )
    call = ("call", "get_weather", '{"days":1}')
    expected = [("Reasoning", "hmm"), ("Text", "I look."), call]
    for step in (1, 5, 1000):
        assert read(GPT_OSS.tokenizer, text, prompt=GPT_OSS.prompt, step=step) == expected
    final = "<|channel|>final<|message|>Yes.<|return|>"
    assert read(GPT_OSS.tokenizer, final, prompt=GPT_OSS.prompt) == [("Text", "Yes.")]
    assert read(GPT_OSS.tokenizer, "once upon", prompt="a tale: ") == [("Text", "once upon")]


def test_a_message_to_a_custom_tool_is_its_one_text() -> None:
    text = "<|channel|>commentary to=functions.apply_patch<|message|>*** Begin\n+a<|call|>"
    expected = as_told("apply_patch", {"input": "*** Begin\n+a"})
    assert read(GPT_OSS.tokenizer, text, prompt=GPT_OSS.prompt) == [expected]
    text = text.replace("apply_patch", "get_weather")
    expected = ("call", "get_weather", "*** Begin\n+a")
    assert read(GPT_OSS.tokenizer, text, prompt=GPT_OSS.prompt) == [expected]


def test_a_message_that_begins_with_a_brace_is_a_tool_s_one_text() -> None:
    head = "<|channel|>commentary to=functions.apply_patch<|message|>"
    for text in ("{ a: 1 }", '{"output": 1', "{"):
        found = read(GPT_OSS.tokenizer, f"{head}{text}<|call|>", prompt=GPT_OSS.prompt)
        assert found == [as_told("apply_patch", {"input": text})]
    cut = f'{head}{{"input": "*** Be'
    expected = ("call", "apply_patch", '{"input": "*** Be')
    assert read(GPT_OSS.tokenizer, cut, prompt=GPT_OSS.prompt) == [expected]


# properties

SNIPPETS = ["<tool_call>", "</tool_call>", "<tool", "_call>", "<", "\n", " ", "{", "}", "é", "Yes."]
SNIPPETS += ["<think>", "</think>", "<function=f>", "</function>", "[TOOL_CALLS]", "[ARGS]", "[{"]
SNIPPETS += ['{"name": "f", "arguments": {}}', '"name": "f", "arguments": {"a": "', '"}', "\\"]
SNIPPETS += DEEPSEEK
SNIPPETS += ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", " to=f", "analysis"]

texts = st.lists(
    st.sampled_from(SNIPPETS)
    | st.sampled_from(FORMATS).map(lambda form: form.text(CALL))
    | st.text(max_size=5),
    max_size=12,
).map("".join)


def cut(data: st.DataObject, length: int) -> list[slice]:
    """A drawn division of so many."""
    places = data.draw(st.lists(st.integers(0, length), max_size=8).map(sorted))
    return [slice(a, b) for a, b in zip([0, *places], [*places, length], strict=True)]


@examples(40)
@given(texts, st.sampled_from(FORMATS), st.booleans(), st.data())
def test_the_same_streamed_and_not(
    text: str, form: CallFormat, has_tools: bool, data: st.DataObject
) -> None:
    ids = form.tokenizer.encode(text)
    tools = TOOLS if has_tools else ()
    whole = read_ids(form.tokenizer, [ids], tools, form.prompt)
    parts = [ids[part] for part in cut(data, len(ids))]
    assert read_ids(form.tokenizer, parts, tools, form.prompt) == whole
    if not has_tools:
        assert all(kind != "call" for kind, *_ in whole)
    numbers = set()
    for division in ([ids], parts, [[token] for token in ids]):
        parser = parser_of(form.tokenizer, form.tokenizer.encode(form.prompt), tools)
        for part in division:
            parser.feed(part)
        numbers.add(parser.num_reasoning)
    assert len(numbers) == 1


@named
def test_long_answers_are_read_alike_in_any_parts(form: CallFormat) -> None:
    """Longer than what is tried as one text, with marks, calls and special tokens among it."""
    begun = "".join(THINK) + "a call " + "".join(call_form_of(form.tokenizer).marks)
    ids = form.tokenizer.encode(f"{'many words, ' * 40}{begun}{'and 猫 more ' * 30}") * 2
    whole = read_ids(form.tokenizer, [ids], TOOLS, form.prompt)
    for size in (1, 7, 63, 64, 65, 200):
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        assert read_ids(form.tokenizer, parts, TOOLS, form.prompt) == whole


def test_a_long_answer_is_decoded_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind special tokens, too, and around marks that are written as text."""
    decode, decoded = Tokenizer.decode, []

    def counted(self: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> str:
        decoded.append(len(ids))
        return decode(self, ids, skip_special)

    words = QWEN.tokenizer.encode("many words, " * 100)
    [special] = [token for token in QWEN.tokenizer.special_texts][:1]
    ids = [*words, special, *words, *QWEN.tokenizer.encode("<tool_call>"), *words]
    parser = parser_of(QWEN.tokenizer, QWEN.tokenizer.encode(QWEN.prompt), TOOLS)
    monkeypatch.setattr(Tokenizer, "decode", counted)
    parser.feed(ids)
    assert len(decoded) < len(ids) / 8 and sum(decoded) < 8 * len(ids)


def read_items(form: CallFormat, items: Iterable[str | Mark]) -> list[tuple[str, ...]]:
    out = PieceWriter()
    if form is GPT_OSS:
        prompt = form.tokenizer.encode(form.prompt)
        reader: ChannelReader | InlineReader = ChannelReader(out, form.tokenizer, prompt, TOOLS)
    else:
        reader = InlineReader(out, call_form_of(form.tokenizer), TOOLS)
    for item in items:
        reader.take(item)
    reader.finish()
    return told(out.finish())


@examples(40)
@given(texts, st.sampled_from(FORMATS))
def test_the_same_wherever_a_text_is_cut(text: str, form: CallFormat) -> None:
    marks = CHANNEL_MARKS if form is GPT_OSS else call_form_of(form.tokenizer).marks
    marked = MarkedText(form.tokenizer, [*THINK, *marks])
    items = [item for token in form.tokenizer.encode(text) for item in marked.push(token)]
    items += marked.finish()
    groups = [(kind, list(each)) for kind, each in groupby(items, type)]
    whole: list[str | Mark] = []
    for kind, each in groups:
        whole += ["".join(each)] if kind is str else each
    expected = read_items(form, whole)
    assert read_items(form, items) == expected
    for i, item in enumerate(whole):
        if isinstance(item, str):
            for place in range(1, len(item)):
                parts = [item[:place], item[place:]]
                assert read_items(form, [*whole[:i], *parts, *whole[i + 1 :]]) == expected


@examples(40)
@given(texts, st.data())
def test_marks_in_text_are_found_however_it_is_divided_into_tokens(
    text: str, data: st.DataObject
) -> None:
    parts = [PLAIN.tokenizer.encode(text[part]) for part in cut(data, len(text))]
    one_by_one = [[token] for part in parts for token in part]
    assert read_ids(PLAIN.tokenizer, one_by_one) == read(PLAIN.tokenizer, text, step=10_000)


@examples(40)
@given(texts, st.sampled_from(INLINE))
def test_nothing_is_lost(text: str, form: CallFormat) -> None:
    found = read(form.tokenizer, text)
    if all(kind == "Text" for kind, *_ in found):
        said = "".join(words for _, words in found)
        for mark in ("<think>", "</think>"):
            if form.tokenizer.token_id(mark) is not None and mark in text:
                return
        assert said == text


def test_pieces_are_told_early() -> None:
    parser = parser_of(QWEN.tokenizer, [], TOOLS)
    found: list[Any] = [parser.feed([i]) for i in QWEN.tokenizer.encode("ab <")]
    assert told(piece for part in found for piece in part)[0] == ("Text", "ab <")
