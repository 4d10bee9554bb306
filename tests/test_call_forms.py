"""Calls of GLM, Kimi, MiniMax, LFM2 and Gemma 4 as their models and servers have them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_tokenizers import (
    FORMATS,
    GEMMA,
    GLM,
    GLM_47,
    GLM_MARKS,
    KIMI,
    KIMI_MARKS,
    LFM2,
    LFM2_MARKS,
    MINIMAX,
    MINIMAX_MARKS,
    THINK,
    CallFormat,
    make_tokenizer,
)
from test_serve_parsing import as_told, read

from lowtide.parsing import has_thoughts, parser_of
from lowtide.parsing.call_forms import CALL_FORMS, call_form_of
from lowtide.parsing.pieces import CallBegun
from lowtide.parsing.thoughts import is_thinking
from lowtide.parsing.tools import Tool

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TIME = Tool("get_time", "", {"properties": {"city": STRING}, "required": ["city"]})
COUNT = Tool("count", "", {"properties": {"n": INTEGER, "code": STRING, "tags": {"type": "array"}}})
ANY = Tool("any", "", {"type": "object"})
NONE = Tool("none", "", {"properties": {}})
TOOLS = (TIME, COUNT, ANY, NONE)
STEPS = (1, 3, 100_000)


def calls_of(form: CallFormat, text: str) -> list[tuple[str, Any]]:
    """Calls with their arguments, the same in every division; texts with their words."""
    told = [read(form.tokenizer, text, TOOLS, form.prompt, step) for step in STEPS]
    assert told[0] == told[1] == told[2]
    return [
        (one[1], json.loads(one[2])) if one[0] == "call" else (one[0], one[1]) for one in told[0]
    ]


def test_each_form_is_known_by_its_template_or_by_its_tokens() -> None:
    marks = {
        "KimiCalls": (KIMI_MARKS, KIMI_MARKS[0]),
        "GlmCalls": (GLM_MARKS, "<tool_call>{name}<arg_key>"),
        "MiniMaxCalls": (MINIMAX_MARKS, MINIMAX_MARKS[0]),
        "PythonCalls": (LFM2_MARKS, LFM2_MARKS[0]),
        "GemmaCalls": (("<|tool_call>", "<tool_call|>"), "<|tool_call>call:"),
        "TaggedCalls": (("<tool_call>", "</tool_call>"), "<tool_call>"),
    }
    for name, (tokens, template) in marks.items():
        by_tokens = make_tokenizer(tuple(tokens))
        by_template = make_tokenizer(template="{{ tools }}" + template)
        assert type(call_form_of(by_tokens)).__name__ == name
        assert type(call_form_of(by_template)).__name__ == name
    assert {type(call_form_of(form.tokenizer)) for form in FORMATS} == set(CALL_FORMS)


# GLM


@pytest.mark.parametrize("form", [GLM, GLM_47], ids=lambda form: form.name)
def test_glm_s_values_are_raw_texts_or_json(form: CallFormat) -> None:
    text = (
        "Look.<tool_call>count<arg_key>n</arg_key><arg_value>42</arg_value>"
        "<arg_key>code</arg_key><arg_value>7</arg_value>\n"
        '<arg_key>tags</arg_key>\n<arg_value>["a", "\u6d4b"]</arg_value></tool_call>'
        "<tool_call>none</tool_call>\n<tool_call>none\n</tool_call>"
    )
    assert calls_of(form, text) == [
        ("Text", "Look."),
        ("count", {"n": 42, "code": "7", "tags": ["a", "\u6d4b"]}),
        ("none", {}),
        ("none", {}),
    ]
    lines = "<tool_call>get_time\n<arg_key>city</arg_key>\n<arg_value>\n a\n\n</arg_value>\n"
    assert calls_of(form, f"{lines}</tool_call>") == [("get_time", {"city": "\n a\n\n"})]
    asked = '<tool_call>{"name": "get_time", "arguments": {"city": "Bern"}}</tool_call>'
    assert calls_of(form, asked) == [("get_time", {"city": "Bern"})]


def test_glm_s_calls_with_blanks_and_text_between() -> None:
    value = "<arg_key>city</arg_key>\n    <arg_value>A</arg_value>"
    one = f"<tool_call>get_time\n    {value}\n    </tool_call>"
    text = f"First.\n\n{one}\n\nmeanwhile\n\n{one}"
    call = ("get_time", {"city": "A"})
    assert calls_of(GLM, text) == [("Text", "First."), call, ("Text", "meanwhile"), call]
    unclosed = one.removesuffix("</tool_call>")
    assert calls_of(GLM, unclosed) == [("Text", unclosed)]


def test_glm_s_marks_in_text_are_text() -> None:
    for text in ("a <tool_call> b", "<tool_call>not a call", "<tool_call></tool_call>"):
        assert calls_of(GLM, text) == [("Text", text)]


def test_glm_s_call_behind_thoughts_that_the_prompt_began() -> None:
    call = "<tool_call>none</tool_call>"
    for step in STEPS:
        found = read(GLM_47.tokenizer, f"Hm.</think>{call}", TOOLS, "<think>", step)
        assert found == [("Reasoning", "Hm."), as_told("none", {})]
        found = read(GLM_47.tokenizer, f"Hm.{call}", TOOLS, "<think>", step)
        assert found == [("Reasoning", "Hm."), as_told("none", {})]


# MiniMax


def test_minimax_s_calls() -> None:
    text = (
        "Now.\n</think>\n\nYes.\n<minimax:tool_call>\n"
        '<invoke name="count">\n<parameter name="n">3</parameter>\n'
        '<parameter name="code">if a < b:\n  "x"</parameter>\n</invoke>\n'
        '<invoke name="none">\n</invoke>\n</minimax:tool_call>'
    )
    expected = [
        ("Reasoning", "Now."),
        ("Text", "Yes."),
        as_told("count", {"n": 3, "code": 'if a < b:\n  "x"'}),
        as_told("none", {}),
    ]
    for step in STEPS:
        assert read(MINIMAX.tokenizer, text, TOOLS, "<think>\n", step) == expected
    one = '<minimax:tool_call><invoke name="none"></invoke></minimax:tool_call>'
    assert calls_of(MINIMAX, one + one) == [("none", {})] * 2
    for text in ("<minimax:tool_call>no", '<minimax:tool_call>\n<invoke name="a b">\n</invoke>'):
        assert calls_of(MINIMAX, text) == [("Text", text)]


def test_minimax_s_cut_call_is_none() -> None:
    text = '<minimax:tool_call><invoke name="get_time"><parameter name="city">a</invoke>'
    parser = parser_of(MINIMAX.tokenizer, [], TOOLS)
    parser.feed(MINIMAX.tokenizer.encode(text))
    assert not any(isinstance(piece, CallBegun) for piece in parser.finish(is_cut=True))


# Kimi


def test_kimi_s_calls_and_their_ids() -> None:
    begin, end, one_begin, one_end, separator = KIMI_MARKS
    ones = [
        f'{one_begin}functions.get_time:0{separator}{{"city": "Bern"}}{one_end}',
        f'{one_begin} functions.count:1 {separator} {{"n": 1}}{one_end}',
        f"{one_begin}none:12{separator}{{}}{one_end}",
    ]
    expected = [("get_time", {"city": "Bern"}), ("count", {"n": 1}), ("none", {})]
    assert calls_of(KIMI, begin + "".join(ones) + end) == expected
    assert calls_of(KIMI, "".join(ones)) == expected  # without the marks around them
    assert calls_of(KIMI, ones[0].removesuffix(one_end) + ones[1]) == expected[:2]
    parser = parser_of(KIMI.tokenizer, [], TOOLS)
    text = begin + "".join(ones) + ones[0] + end
    pieces = [*parser.feed(KIMI.tokenizer.encode(text)), *parser.finish()]
    ids = [piece.id for piece in pieces if isinstance(piece, CallBegun)]
    assert ids[:2] == ["functions.get_time:0", "functions.count:1"]
    assert len(set(ids)) == 4 and all(each.startswith("call_") for each in ids[2:])


def test_kimi_s_call_that_is_a_number_alone() -> None:
    """Its tool is the only one that has such arguments."""
    begin, end, one_begin, one_end, separator = KIMI_MARKS

    def called(arguments: str) -> str:
        return f"{begin}{one_begin}0 {separator}{arguments}{one_end}{end}"

    assert calls_of(KIMI, called('{"city": "Bern"}')) == [("get_time", {"city": "Bern"})]
    assert calls_of(KIMI, called('{"n": 1}')) == [("count", {"n": 1})]
    for text in (called('{"other": 1}'), called('{"n": 1'), called("{}")):
        assert calls_of(KIMI, text) == [("Text", text)]


def test_kimi_s_broken_arguments_are_those_of_their_own_call() -> None:
    begin, end, one_begin, one_end, separator = KIMI_MARKS
    broken = f'{one_begin}functions.get_time:0{separator}{{"city": "a"{one_end}'
    whole = f"{one_begin}functions.none:1{separator}{{}}{one_end}"
    for step in STEPS:
        found = read(KIMI.tokenizer, begin + broken + whole + end, TOOLS, step=step)
        assert found == [("call", "get_time", '{"city": "a"'), as_told("none", {})]


def test_kimi_s_calls_in_thoughts_that_are_not_closed() -> None:
    begin, end, one_begin, one_end, separator = KIMI_MARKS
    call = f"{one_begin}functions.none:0{separator}{{}}{one_end}"
    for text in (f"<think>Hm.{begin}{call}{end}", f"<think>Hm.{call}"):
        assert calls_of(KIMI, text) == [("Reasoning", "Hm."), ("none", {})]


# LFM2


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('n=1, code="a"', {"n": 1, "code": "a"}),
        ("n = 1 ,code = 'a' ,", {"n": 1, "code": "a"}),
        ('code="print(\\"hi\\")\\n\\tx"', {"code": 'print("hi")\n\tx'}),
        ("code='it\\'s'", {"code": "it's"}),
        ("code='it's [a], (b)', n=2", {"code": "it's [a], (b)", "n": 2}),
        ('code="""one "two"\nthree"""', {"code": 'one "two"\nthree'}),
        ('code="\\u00e9\\ud83d\\ude00\\x41\\q"', {"code": "\u00e9\U0001f600A\\q"}),
        ("code=12", {"code": "12"}),
        ('n="12"', {"n": 12}),
        ("tags=['a', True, None, -1.5e3, {'b': [false, null]}]",
         {"tags": ["a", True, None, -1500.0, {"b": [False, None]}]}),
        ("tags=(1, 2)", {"tags": [1, 2]}),
        ("tags=[]", {"tags": []}),
        ("code=Paris", {"code": "Paris"}),
        ("tags={'a', 'b'}", {"tags": ["a", "b"]}),
        ("tags={}, n=007", {"tags": {}, "n": 7}),
        ("n=-05, code=r'a\\n'", {"n": -5, "code": "a\\n"}),
        ("code='sed -n '1,4p' /a/b.py'", {"code": "sed -n '1,4p' /a/b.py"}),
        ("code='grep \"]\" a | python -c \"f(x='\\,')\"', n=1",
         {"code": "grep \"]\" a | python -c \"f(x='\\,')\"", "n": 1}),
        ("code='a\x00b\n'", {"code": "a\x00b\n"}),
        ("more={'a': 1}", {"more": {"a": 1}}),
        ("", {}),
    ],
)  # fmt: skip
def test_lfm2_s_arguments(written: str, arguments: dict[str, Any]) -> None:
    text = f"{LFM2_MARKS[0]}[count({written})]{LFM2_MARKS[1]}"
    assert calls_of(LFM2, text) == [("count", arguments)]


def test_lfm2_s_lists() -> None:
    begin, end = LFM2_MARKS
    dotted = f'A.{begin}[get_time(city="a"), Calendar.create(a=1)]{end}B.'
    assert calls_of(LFM2, dotted) == [
        ("Text", "A."),
        ("get_time", {"city": "a"}),
        ("Calendar.create", {"a": 1}),
        ("Text", "B."),
    ]
    assert calls_of(LFM2, f"{begin}none(){end}") == [("none", {})]
    assert calls_of(LFM2, f"{begin}[none()]") == [("none", {})]  # the closing mark was forgotten
    as_json = f'{begin}[{{"name": "get_time", "arguments": {{"city": "a"}}}}]{end}'
    assert calls_of(LFM2, as_json) == [("get_time", {"city": "a"})]
    for text in (f"{begin}[see](url){end}", f"{begin}no call{end}", f"{begin}[none(]{end}"):
        assert calls_of(LFM2, text) == [("Text", text)]


def test_lfm2_s_mark_in_a_text_belongs_to_it() -> None:
    begin, end = LFM2_MARKS
    for value in (f"{begin}[none()]{end}", f"x{end}", f"')]{end}", begin):
        text = f"{begin}[count(code={json.dumps(value)}), none()]{end}"
        assert calls_of(LFM2, text) == [("count", {"code": value}), ("none", {})]


# Gemma 4


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('n:42,code:<|"|>a, "b": {c}<|"|>', {"n": 42, "code": 'a, "b": {c}'}),
        ("n:-7", {"n": -7}),
        ("n:1.5e10", {"n": 1.5e10}),
        ('code:<|"|>12<|"|>', {"code": "12"}),
        ("code:12", {"code": "12"}),
        ('n:<|"|>12<|"|>', {"n": 12}),
        ("code:London", {"code": "London"}),
        ("code:,n:1", {"code": "", "n": 1}),
        ("n:3.", {"n": 3.0}),
        ('more:{<|"|>3<|"|>:<|"|>a]}<|"|>,b:{}}', {"more": {"3": "a]}", "b": {}}}),
        ('tags:[<|"|>a<|"|>,true,null,{x:{y:<|"|>z<|"|>},n:[]}]',
         {"tags": ["a", True, None, {"x": {"y": "z"}, "n": []}]}),
        ('code:<|"|>a\\n<|"|> is a quote<|"|>', {"code": 'a\\n<|"|> is a quote'}),
        ("", {}),
    ],
)  # fmt: skip
def test_gemma_s_arguments(written: str, arguments: dict[str, Any]) -> None:
    assert calls_of(GEMMA, f"<|tool_call>call:count{{{written}}}<tool_call|>") == [
        ("count", arguments)
    ]


def test_gemma_s_call_with_a_colon_or_without_its_last_mark() -> None:
    for text in ("<|tool_call>:call:none{}<tool_call|>", "<|tool_call>call:none{}"):
        assert calls_of(GEMMA, text) == [("none", {})]
    dotted = "<|tool_call>call:fs.read-file{}<tool_call|>"
    assert calls_of(GEMMA, dotted) == [("fs.read-file", {})]


def test_gemma_s_calls_thoughts_and_what_is_none() -> None:
    call = "<|tool_call>call:none{}<tool_call|>"
    text = f"<|channel>thought\nHm.\n<channel|>Yes.{call}{call}"
    assert calls_of(GEMMA, text) == [("Reasoning", "Hm."), ("Text", "Yes."), *[("none", {})] * 2]
    for text in ("<|tool_call>no", "<|tool_call>call:a b{}<tool_call|>", "<|tool_call>call:none{"):
        assert calls_of(GEMMA, text) == [("Text", text)]
    mark = "a<tool_call|>b<|tool_call>call:none{}<tool_call|>"
    text = f'<|tool_call>call:count{{code:<|"|>{mark}<|"|>}}<tool_call|>'
    assert calls_of(GEMMA, text) == [("count", {"code": mark})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought<channel|>Hi", [("Text", "Hi")]),
        ("<|channel>thought\n<channel|>Hi<channel|>", [("Text", "Hi")]),
        ("<|channel>thought\n<channel|>Hi<|channel>thought\n<channel|>", [("Text", "Hi")]),
        ("<|channel><|channel>thought\na<channel|>Hi", [("Reasoning", "a"), ("Text", "Hi")]),
        ("<|channel>thoughts<channel|>Hi", [("Reasoning", "thoughts"), ("Text", "Hi")]),
        ("<|channel>tho", [("Reasoning", "tho")]),
    ],
)
def test_gemma_s_thoughts(text: str, expected: list[tuple[str, str]]) -> None:
    assert calls_of(GEMMA, text) == expected


def test_thoughts_that_gemma_s_prompt_begins() -> None:
    tokenizer = GEMMA.tokenizer
    assert has_thoughts(tokenizer)
    for prompt, is_begun in (
        ("<|channel>", True),
        ("<|channel>thought\n", True),
        ("<|channel>thought\n<channel|>", False),
        ("<|channel>thought\nHm", False),
    ):
        assert is_thinking(tokenizer, tokenizer.encode(prompt)) is is_begun
    for prompt, text in (("<|channel>", "thought\nHm."), ("<|channel>thought\n", "Hm.")):
        for step in STEPS:
            found = read(tokenizer, f"{text}<channel|>Hi", TOOLS, prompt, step)
            assert found == [("Reasoning", "Hm."), ("Text", "Hi")]


def test_thoughts_of_others_are_those_of_think() -> None:
    assert not has_thoughts(make_tokenizer(("<|channel>",)))
    assert has_thoughts(make_tokenizer(THINK))
