"""Answers that must have a form.

Drawn walks through the allowed tokens write that form, impossible forms are refused, and a mask
changes nothing else.
"""

from __future__ import annotations

import json
import math
import random
import re
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hash_model import EOS as HASH_EOS
from hash_model import VOCAB, HashModel, make_kv_cache
from kind_decoders import blocks_decoder, causal_decoder
from small_tokenizers import (
    CODER,
    EOS,
    FORMATS,
    GPT_OSS,
    HELD,
    PLAIN,
    QWEN,
    CallFormat,
    make_tokenizer,
)
from whole import decoded

from lowtide.child_process import ChildProcess
from lowtide.config import Blocks, Causal
from lowtide.core import BoolArray
from lowtide.decode.request import Finished, Request
from lowtide.errors import CheckpointError, UnsupportedError, UsageError
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.params import SamplingParams
from lowtide.parsing import parser_of
from lowtide.parsing.pieces import CallArguments, CallBegun, Piece, Reasoning, Text
from lowtide.parsing.tools import Tool
from lowtide.serve import grammar_compiler
from lowtide.serve.errors import QueueFull
from lowtide.serve.grammar import Constraint, GrammarMask, Grammars, check_kept
from lowtide.serve.grammar_text import AnswerForm, grammar_text
from lowtide.serve.quoted_lark import quoted_lark

COLOUR = Tool(
    "paint",
    "",
    {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green"], "type": "string"},
            "n": {"enum": [1, 2]},
        },
        "required": ["colour", "n"],
        "additionalProperties": False,
    },
)
STOP = Tool("stop", "", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (COLOUR, STOP)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
PATCH = 'start: "*** Begin\\n" line+ "*** End"\nline: /\\+[ab]{1,3}\\n/'


def grammars_of(tokenizer: Tokenizer | None = QWEN.tokenizer, **config: Any) -> Grammars:
    return new_grammars(tokenizer, **config) if config else usual_grammars(tokenizer)


@cache
def usual_grammars(tokenizer: Tokenizer | None) -> Grammars:
    """One for all tests: each has a process that tries grammars."""
    return new_grammars(tokenizer)


def new_grammars(tokenizer: Tokenizer | None, blame_s: float = math.inf, **config: Any) -> Grammars:
    """blame_s: without a limit, so that no test depends on how fast this machine is."""
    vocab_size = 400 if tokenizer is None else tokenizer.vocab_size + 3
    facts = {"eos_token_ids": (EOS,), "decoding": Causal(), "architecture": "Tiny"}
    model: Any = SimpleNamespace(**({"vocab_size": vocab_size} | facts | config))
    return Grammars(model, tokenizer, blame_s=blame_s)


def request_of(tokenizer: Tokenizer, prompt: str = "", **params: Any) -> Request:
    return Request(prompt=tokenizer.encode(prompt) or [1], params=SamplingParams(**params))


def mask_of(
    constraint: Constraint | None, form: CallFormat = QWEN, prompt: str | None = None, **asked: Any
) -> GrammarMask:
    request = request_of(form.tokenizer, form.prompt if prompt is None else prompt)
    made = grammars_of(form.tokenizer).applied(request, constraint, **asked)
    assert isinstance(made.mask, GrammarMask)
    return made.mask


def walk(mask: GrammarMask, seed: int) -> list[int]:
    """Allowed tokens, drawn until the end of text."""
    chance, ids = random.Random(seed), [-1]
    while ids[-1] != EOS:
        allowed = mask.allowed()
        assert np.array_equal(mask.allowed(), allowed)
        choices = np.flatnonzero(allowed).tolist()
        ids.append(EOS if EOS in choices and chance.random() < 0.5 else chance.choice(choices))
        mask.take(ids[-1])
        assert not mask.failure and len(ids) < 3000
    return ids[1:]


def written(tokenizer: Tokenizer, mask: GrammarMask, seed: int) -> str:
    ids = walk(mask, seed)
    return tokenizer.decode([i for i in ids if i != EOS], skip_special=False)


def force(mask: GrammarMask, ids: Sequence[int]) -> None:
    """Has the answer go on with tokens that are all allowed."""
    for token in ids:
        assert mask.allowed()[token]
        mask.take(token)
        assert not mask.failure


@pytest.mark.parametrize("seed", range(3))
def test_json_of_a_schema(seed: int) -> None:
    text = written(PLAIN.tokenizer, mask_of(Constraint.json_schema(SCHEMA), PLAIN), seed)
    value = json.loads(text)
    assert list(value) == ["ok", "kind"] and isinstance(value["ok"], bool)
    assert value["kind"] in ("a", "b")


def test_an_answer_ends_where_its_form_does_and_not_before() -> None:
    mask = mask_of(Constraint.json_schema({"const": {"a": 1}}), PLAIN)
    text = '{"a": 1}'
    for token in PLAIN.tokenizer.encode(text):
        assert not mask.allowed()[EOS]
        force(mask, [token])
    assert np.flatnonzero(mask.allowed()).tolist() == [EOS]
    mask.take(EOS)
    assert not mask.failure


def test_any_object_any_expression_any_grammar() -> None:
    mask = mask_of(Constraint.json_object(), PLAIN)
    force(mask, PLAIN.tokenizer.encode('{"é": [null, {"b": -1.5e3}], "c": "\\u001f\\n"}'))
    assert mask.allowed()[EOS]
    assert not mask_of(Constraint.json_object(), PLAIN).allowed()[ord("[")]
    for seed in range(3):
        text = written(PLAIN.tokenizer, mask_of(Constraint.regex(r"a{2,4}/\d\n"), PLAIN), seed)
        assert re.fullmatch(r"a{2,4}/\d\n", text)
        text = written(PLAIN.tokenizer, mask_of(Constraint.lark(PATCH), PLAIN), seed)
        assert re.fullmatch(r"\*\*\* Begin\n(\+[ab]{1,3}\n)+\*\*\* End", text)


def test_blanks_in_json_are_bounded() -> None:
    mask = mask_of(Constraint.json_schema(SCHEMA), PLAIN)
    force(mask, [ord("{"), *[ord("\n")] * 64])
    assert not mask.allowed()[ord("\n")] and not mask.allowed()[ord(" ")]


@pytest.mark.parametrize("prompt", ["", "q<think>\n", "q<think>\n\n</think>\n\n"])
def test_thoughts_come_before_the_form(prompt: str) -> None:
    tokenizer = QWEN.tokenizer
    mask = mask_of(Constraint.json_schema(SCHEMA), QWEN, prompt)
    thoughts = "hm, {\n</think>\n\n"
    if not prompt.endswith("<think>\n"):
        assert mask.allowed()[ord("{")]
        thoughts = "<think>" + thoughts
    answer = thoughts + '{"ok": true, "kind": "a"}'
    force(mask, tokenizer.encode(answer))
    assert mask.allowed()[EOS]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("choice", ["required", "paint"])
def test_a_call_that_must_be_made(form: CallFormat, choice: str) -> None:
    for seed in range(3):
        mask = mask_of(None, form, tools=TOOLS, tool_choice=choice, parallel_calls=False)
        ids = _answer(form, mask, seed)
        parser = parser_of(form.tokenizer, form.tokenizer.encode(form.prompt), TOOLS)
        pieces = [*parser.feed(ids), *parser.finish()]
        pieces = [piece for piece in pieces if not isinstance(piece, Reasoning | Text)]
        begun, *arguments = pieces
        assert isinstance(begun, CallBegun)
        assert begun.name in (["paint", "stop"] if choice == "required" else ["paint"])
        value = json.loads(arguments_of(arguments))
        if begun.name == "paint":
            is_any_order = form in HELD
            assert (sorted(value) if is_any_order else list(value)) == ["colour", "n"]
            assert value["colour"] in ("red", "green")
            assert value["n"] in (1, 2)
        else:
            assert value == {}


def arguments_of(pieces: Sequence[Piece]) -> str:
    """Those of the one call among them."""
    return "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))


def _answer(form: CallFormat, mask: GrammarMask, seed: int) -> list[int]:
    """Without thoughts and preambles, which a walk would never leave."""
    if form is not GPT_OSS:
        thoughts = form.tokenizer.token_id("<think>")
        if thoughts is not None:
            begin = form.tokenizer.encode(form.text(("paint", {})))[0]
            force(mask, [begin])
            return [begin, *walk(mask, seed)]
        return walk(mask, seed)
    header = form.tokenizer.encode("<|channel|>commentary to=functions.")
    force(mask, header)
    end = form.tokenizer.token_id("<|call|>")
    ids, chance = [*header], random.Random(seed)
    while ids[-1] != end:
        ids.append(chance.choice(np.flatnonzero(mask.allowed()).tolist()))
        force(mask, ids[-1:])
    return ids


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_strict_tool_s_arguments_where_none_must_be_called(form: CallFormat) -> None:
    tools = (replace(COLOUR, strict=True), STOP)
    encode = form.tokenizer.encode
    mask = mask_of(None, form, tools=tools)
    said = "Let me paint.\n"
    if form is GPT_OSS:
        said = f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant"
    right = form.text(("paint", {"colour": "red", "n": 2}))
    force(mask, encode(said + right))
    mask = mask_of(None, form, tools=tools)
    call = form.text(("paint", {"colour": "blue"}))
    wrong = encode(said + call)
    place = next(i for i, token in enumerate(wrong) if not taken(mask, token))
    accepted = form.tokenizer.decode(wrong[:place], skip_special=False)
    assert accepted.rstrip('"\n') == f"{said}{call[: call.index('blue')]}".rstrip('"\n')
    mask = mask_of(None, form, tools=tools)
    text = "<|channel|>final<|message|>Done." if form is GPT_OSS else "Done."
    force(mask, encode(text))
    assert mask.allowed()[EOS]


def taken(mask: GrammarMask, token: int) -> bool:
    is_allowed = bool(mask.allowed()[token])
    if is_allowed:
        mask.take(token)
    return is_allowed


def test_several_calls_where_they_are_wished() -> None:
    text = QWEN.text(("stop", {}), ("paint", {"colour": "red", "n": 1}))
    mask = mask_of(None, tools=TOOLS, tool_choice="required")
    force(mask, QWEN.tokenizer.encode(text))
    assert mask.allowed()[EOS]
    mask = mask_of(None, tools=TOOLS, tool_choice="required", parallel_calls=False)
    force(mask, QWEN.tokenizer.encode(QWEN.text(("stop", {}))))
    assert np.flatnonzero(mask.allowed()).tolist() == [EOS]


def test_a_form_and_tools_together() -> None:
    for text in ('{"ok": true, "kind": "b"}', QWEN.text(("stop", {}))):
        mask = mask_of(Constraint.json_schema(SCHEMA), tools=TOOLS)
        force(mask, QWEN.tokenizer.encode(text))
        assert mask.allowed()[EOS]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_custom_tool_s_one_text(form: CallFormat) -> None:
    schema = {"properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = Tool("apply_patch", "", schema, grammar=PATCH)
    patch = "*** Begin\n+ab\n*** End"
    for is_right, text in ((True, patch), (False, patch.replace("+", "-"))):
        mask = mask_of(None, form, tools=(tool,))
        ids = form.tokenizer.encode(form.text(("apply_patch", {"input": text})))
        assert all(taken(mask, token) for token in ids) is is_right
    parser = parser_of(form.tokenizer, form.tokenizer.encode(form.prompt), (tool,))
    ids = form.tokenizer.encode(form.text(("apply_patch", {"input": patch})))
    told = [*parser.feed(ids), *parser.finish()]
    assert json.loads(arguments_of(told)) == {"input": patch}


AGENTS = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Update File: " filename LF change+
filename: /(.+)/
change: ("+" | "-" | " ") /(.*)/ LF -> line  // "one"
%import common.LF
"""


@pytest.mark.parametrize(
    ("lark", "right", "wrong"),
    [
        (AGENTS, '*** Begin Patch\n*** Update File: a "b"\\c\n+\té "\\"\n*** End Patch', "*** "),
        (r'start: /[^a-c"]+/ "\"\\"', 'x\n\\"\\', 'x""'),
        (r'start: /["\\n-x_]{2}/', "n\\", "a"),
        (r"start: /[0-9\n\]]+\s\w\/\.\"?/", '1\n]\t_/."', "1"),
        ("start: INT NEWLINE\n%import common.INT\n%import common.NEWLINE", "12\r\n", "a"),
    ],
)
def test_a_grammar_of_a_text_inside_json(lark: str, right: str, wrong: str) -> None:
    quoted = quoted_lark(lark)
    assert quoted is not None
    for text, is_right in ((right, True), (wrong, False)):
        inside = json.dumps(text, ensure_ascii=False)[1:-1]
        for written, grammar_of in ((text, lark), (inside, quoted)):
            mask = mask_of(Constraint.lark(grammar_of), PLAIN)
            ids = PLAIN.tokenizer.encode(written)
            assert (all(taken(mask, token) for token in ids) and mask.allowed()[EOS]) == is_right


@pytest.mark.parametrize(
    "lark",
    [
        "start: <|endoftext|>",
        "start: @other",
        'start: %json {"type": "string"}',
        "start: /a/i",
        "start: /(?s:.)/",
        r"start: /[ -~]/",
        r"start: /\p{L}/",
        r"start: /[\d]/",
        "start: /[[:alpha:]]/",
        "start: LF\n%import common.LF -> LF",
        "start: A\n%ignore /a/",
        "start: a\na: b\nb: a?",
        "?start: /a/",
        "start: [A]\nA: /a/",
        'start: "a"i',
    ],
)
def test_a_grammar_that_cannot_be_rewritten_surely_is_not(lark: str) -> None:
    assert quoted_lark(lark) is None


def test_nothing_to_form_is_no_mask() -> None:
    grammars, request = grammars_of(), request_of(QWEN.tokenizer)
    assert grammars.applied(request, None) is request
    assert grammars.applied(request, None, (), "none") is request
    check_kept(request)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_text_that_is_not_held_to_its_grammar_is_told(form: CallFormat, choice: str) -> None:
    """Where strings are JSON's, a grammar may not be rewritten; raw ones are held to any."""
    schema = {"properties": {"input": {"type": "string"}}, "required": ["input"]}
    free, kept = (
        Tool(name, "", schema, grammar=lark)
        for name, lark in (("free", "start: /ab/i"), ("kept", 'start: "ab"'))
    )
    for tools in ((free,), (kept, free)):
        unguided: list[str] = []
        request = request_of(form.tokenizer, form.prompt)
        made = grammars_of(form.tokenizer).applied(
            request, None, tools, choice, on_unguided=unguided.append
        )
        is_raw = 'a"' in form.text(("free", {"input": 'a"'}))
        ids = form.tokenizer.encode(form.text(("free", {"input": "no"})))
        mask: Any = made.mask
        assert all(taken(mask, token) for token in ids) != is_raw
        told = [one.partition(". ")[0] for one in unguided]
        assert told == ([] if is_raw else ["Not held to their grammars: 'free'"])


def test_texts_that_are_not_held_to_their_grammars_are_told_first() -> None:
    """A schema's reason may be longer than the header that both are told in."""
    schema = {"properties": {"input": {"type": "string"}}, "required": ["input"]}
    refused = {"properties": {"a": {"type": "string", "pattern": "(" * 500}}}
    tools = Tool("f", "", refused), Tool("free", "", schema, grammar="start: /ab/i")
    unguided: list[str] = []
    asked = request_of(QWEN.tokenizer), None, tools
    grammars_of(QWEN.tokenizer).applied(*asked, on_unguided=unguided.append)
    [told] = unguided
    assert told.startswith("Not held to their grammars: 'free'. ")
    assert told.endswith("unclosed group")


# refusals


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Constraint.json_schema([1]), "object, not list"),
        (lambda: Constraint.json_schema({"enum": ["a" * 300_000]}), "300[0-9]{3} characters; at m"),
        (lambda: Constraint.regex("a" * 9_000), "9000 characters; 1 to 8192"),
        (lambda: Constraint.regex(""), "0 characters"),
        (lambda: Constraint.regex("\ud800"), "not valid Unicode"),
        (lambda: Constraint.lark('start: "\ud800"'), "not valid Unicode"),
        (lambda: Constraint.lark("x" * 300_000), "300000 characters; at most 262144"),
        (lambda: Constraint.json_schema(nested_schema(100)), "more than 64 deep"),
        (lambda: Constraint.json_schema(nested_schema(100_000)), "more than 64 deep"),
    ],
)
def test_what_is_too_large_is_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        make()


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.lark("nonsense"),
        Constraint.lark("start: a\n"),
        Constraint.lark("start: <|no_such_token|>"),
        Constraint.lark(""),
        Constraint.regex("(("),
        Constraint.regex("(?=a)b"),
        Constraint.json_schema({"type": "colour"}),
        Constraint.json_schema({"type": "string", "pattern": "(("}),
        Constraint.json_schema({"$ref": "http://example.org/schema"}),
        Constraint.json_schema({"type": "object", "minProperties": 3, "maxProperties": 1}),
        Constraint.json_schema({"not": {"type": "string"}}),
        Constraint.json_schema(
            {"anyOf": [{"properties": {f"k{i}_{j}": {} for j in range(30)}} for i in range(200)]}
        ),
        Constraint.lark("start: A\nA: " + " & ".join(f"/(.*{c}.*){{30}}/" for c in "abcdefghi")),
        Constraint.regex("(a{400}){400}"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_reason(constraint: Constraint) -> None:
    grammars = grammars_of(PLAIN.tokenizer)
    with pytest.raises(UsageError, match="form (cannot be kept to|was not compiled)"):
        grammars.applied(request_of(PLAIN.tokenizer), constraint)
    made = grammars.applied(request_of(PLAIN.tokenizer), Constraint.regex("a"))
    assert made.mask is not None


SELF: dict[str, Any] = {"type": "array", "items": {"$ref": "#/$defs/a"}}


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.regex("(.*a.{900}){900}"),
        Constraint.lark('start: a\na: a a | "x" | ""'),
        Constraint.lark('start: a\na: "x" a | "x"'),
        Constraint.json_schema({"type": "array", "minItems": 10**6}),
        Constraint.json_schema(
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [SELF] * 100 + [{"type": "null"}]}}}
        ),
    ],
)
def test_what_is_too_complex_later_ends_that_answer_alone(constraint: Constraint) -> None:
    grammars, request = grammars_of(PLAIN.tokenizer), request_of(PLAIN.tokenizer)
    made, chance = grammars.applied(request, constraint), random.Random(0)
    assert isinstance(made.mask, GrammarMask)
    for _ in range(50):
        choices = np.flatnonzero(made.mask.allowed()).tolist()
        if made.mask.failure:
            assert choices == [EOS]
            with pytest.raises(UsageError, match="could not be kept to"):
                check_kept(made)
            return
        made.mask.take(chance.choice([token for token in choices if token != EOS] or choices))
    check_kept(made)


def test_grammars_of_many_tools_are_measured_before_they_are_rewritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lowtide.serve.grammar_text.quoted_lark", None)
    tools = [Tool(f"f{i}", "", {}, grammar="start: " + "/a/ " * 200) for i in range(512)]
    with pytest.raises(UsageError, match="at most 262144 are accepted"):
        grammars_of(PLAIN.tokenizer).applied(request_of(PLAIN.tokenizer), None, tools)


def test_a_trial_that_hangs_in_little_memory_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As llguidance does if it panics and has no memory to say where."""
    ask = ChildProcess.ask

    def hangs(child: ChildProcess, asked: Any, limit_s: float, lane: int) -> dict[str, Any]:
        if grammar_compiler.LANES[lane] is grammar_compiler.QUICK:
            return {"signal": signal.SIGALRM}
        return ask(child, asked, limit_s, lane)

    monkeypatch.setattr(ChildProcess, "ask", hangs)
    grammars, request = new_grammars(PLAIN.tokenizer), request_of(PLAIN.tokenizer)
    panics = Constraint.json_schema({"type": "integer", "maximum": "\N{GRINNING FACE}" * 50})
    with pytest.raises(UsageError, match="compiler failed: end byte index") as raised:
        grammars.applied(request, panics)
    assert "backtrace" not in str(raised.value)


def test_a_form_waits_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for one that takes seconds, once that is known."""
    is_told, is_slow, ask = threading.Event(), threading.Event(), ChildProcess.ask
    grammars, request = new_grammars(QWEN.tokenizer), request_of(QWEN.tokenizer)
    slow, quick = Constraint.regex("slow"), Constraint.regex("b")

    def waits(child: ChildProcess, asked: Any, limit_s: float, lane: int) -> dict[str, Any]:
        if "slow" not in asked["grammar"]:
            return ask(child, asked, limit_s, lane)
        if grammar_compiler.LANES[lane] is grammar_compiler.QUICK:
            return {"signal": signal.SIGPROF}
        is_slow.set()
        is_told.wait(60)
        return {"num_bytes": 0}

    monkeypatch.setattr(ChildProcess, "ask", waits)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(grammars.applied, request, slow)
        assert grammars.applied(request, quick).mask is not None
        with monkeypatch.context() as patch:
            patch.setattr(grammar_compiler, "MAX_WAIT_S", 0.0)
            assert is_slow.wait(60)
            with pytest.raises(QueueFull, match="other requests"):
                grammars.applied(request, Constraint.regex("slow too"))
        assert not first.done()
        is_told.set()
        assert first.result(60).mask is not None


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "null"]}, "metric", "metric"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "a\nb", "a\nb"),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "integer"]}, "7 or so", "7 or so"),
        ({"type": "string", "const": "only"}, "only", "only"),
        ({"type": ["string", "null"], "enum": ["a", None]}, "null", None),
        ({"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"const": 5}]}, "5", 5),
        ({"type": "integer"}, "7", 7),
    ],
)
def test_a_value_that_is_written_under_a_schema_is_read_as_it(
    schema: dict[str, Any], text: str, value: object
) -> None:
    """Qwen3-Coder's, whose texts are not in quotes."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = Tool("f", "", parameters, strict=True)
    told = f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    told = f"<tool_call>\n{told}\n</tool_call>"
    mask = mask_of(None, CODER, tools=(tool,), tool_choice="f")
    force(mask, CODER.tokenizer.encode(told, add_special=False))
    parser = parser_of(CODER.tokenizer, [], (tool,))
    pieces = [*parser.feed(CODER.tokenizer.encode(told, add_special=False)), *parser.finish()]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    assert json.loads(arguments) == {"a": value}


def test_no_form_is_compiled_for_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, is_gone = new_grammars(QWEN.tokenizer), threading.Event()
    request, is_begun, may_end = request_of(QWEN.tokenizer), threading.Event(), threading.Event()
    asked, ask = (request, Constraint.json_object()), ChildProcess.ask

    def waits(child: ChildProcess, *arguments: Any) -> dict[str, Any]:
        is_begun.set()
        may_end.wait(60)
        return ask(child, *arguments)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(ChildProcess, "ask", waits)
        first = pool.submit(grammars.applied, request, Constraint.regex("a"))
        assert is_begun.wait(60)
        behind = pool.submit(grammars.applied, *asked, is_gone=is_gone)
        assert not behind.done()
        is_gone.set()
        with pytest.raises(QueueFull):
            behind.result(60)
        may_end.set()
        assert first.result(60).mask is not None
    with pytest.raises(QueueFull, match="gone"):
        grammars.applied(*asked, is_gone=is_gone)
    assert grammars.applied(*asked).mask is not None


def test_a_call_held_to_a_schema_cannot_begin_without_its_mark() -> None:
    """Qwen3-Coder may forget the first one, and what follows is read as a call."""
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"enum": [1]}}}, strict=True)
    mask = mask_of(None, CODER, tools=(tool,))
    *text, last = CODER.tokenizer.encode("See <function=", add_special=False)
    force(mask, text)
    assert not mask.allowed()[last] and mask.allowed()[EOS]


def test_a_tool_with_a_schema_that_is_not_known() -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"not": {"type": "string"}}}})
    mask_of(None, tools=(tool,), tool_choice="f")  # as far as it is known
    with pytest.raises(UsageError, match="cannot be kept to"):
        mask_of(None, tools=(replace(tool, strict=True),))
    with pytest.raises(UsageError, match="schema of 'deep' is nested more than 64"):
        mask_of(None, tools=(Tool("deep", "", nested_schema(70)),), tool_choice="required")
    with pytest.raises(UsageError, match="no tool for tool_choice 'other'"):
        mask_of(None, tools=(tool,), tool_choice="other")


@pytest.mark.parametrize("schema", [{"type": "bogus"}, {"maximum": 2**60}])
@pytest.mark.parametrize("place", range(5))
def test_a_refusal_names_the_tool_at_fault(place: int, schema: dict[str, Any]) -> None:
    fine = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [Tool(f"tool_{i}", "", fine, strict=True) for i in range(5)]
    bad = {"type": "object", "properties": {"a": {"type": "integer", **schema}}}
    tools[place] = replace(tools[place], parameters=bad)
    with pytest.raises(UsageError, match=f"^Tool 'tool_{place}': "):
        mask_of(None, tools=tuple(tools))
    with pytest.raises(UsageError, match="^The answer's form cannot be kept to"):
        mask_of(Constraint.json_schema({"type": "bogus"}), tools=tuple(tools[:place]))


ODD: list[dict[str, Any]] = [
    {"properties": {"a": {}}, "required": 7},
    {"properties": {"a": {"type": "string"}}, "required": {"a": 1}},
    {"properties": []},
    {"properties": {"a": 5}},
    {"properties": {"a": {"type": {"b": 1}}}},
    {"properties": {"a": {"type": "string", "enum": [None, {}]}}},
    {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": 3},
    {"properties": {"a\n>": {"type": "string"}}},
    {"properties": {"a": {"const": float("nan")}}},
    {"type": 5},
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_odd_schemas_are_kept_to_or_refused(form: CallFormat) -> None:
    grammars, request = grammars_of(form.tokenizer), request_of(form.tokenizer, form.prompt)
    for schema in ODD:
        with suppress(UsageError):
            made = grammars.applied(request, None, (Tool("f", "", schema),), "f")
            assert made.mask is not None and made.mask.allowed().any()


def test_diffusion_models_refuse_by_name() -> None:
    grammars = grammars_of(decoding=Blocks())
    request = request_of(QWEN.tokenizer)
    for asked, name in (
        ({"constraint": Constraint.json_object()}, "`response_format`: Tiny"),
        ({"constraint": None, "tools": (replace(STOP, strict=True),)}, "strict: Tiny"),
        ({"constraint": None, "tools": TOOLS, "tool_choice": "required"}, "tool_choice 'required'"),
    ):
        with pytest.raises(UnsupportedError, match=name):
            grammars.applied(request, **asked)
    assert grammars.applied(request, None, (replace(STOP, grammar=PATCH),)) is request


def test_models_that_cannot_be_formed() -> None:
    asked = (request_of(QWEN.tokenizer), Constraint.json_object())
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        grammars_of(None).applied(*asked)
    with pytest.raises(UnsupportedError, match="no token that ends"):
        grammars_of(eos_token_ids=()).applied(*asked)
    with pytest.raises(CheckpointError, match="cannot be guided"):
        grammars_of(vocab_size=100).applied(*asked)
    with pytest.raises(UsageError, match="ignore_eos"):
        grammars_of().applied(request_of(QWEN.tokenizer, ignore_eos=True), asked[1])


def test_a_form_that_fails_in_the_midst_ends_the_answer() -> None:
    request = request_of(PLAIN.tokenizer)
    made = grammars_of(PLAIN.tokenizer).applied(request, Constraint.regex("ab"))
    assert made.mask is not None
    made.mask.take(ord("x"))
    assert np.flatnonzero(made.mask.allowed()).tolist() == [EOS]
    made.mask.take(EOS)
    with pytest.raises(UsageError, match="could not be kept to"):
        check_kept(made)


# decoding


class All:
    """Allows everything, and knows what was chosen."""

    def __init__(self, *refused: int) -> None:
        self.is_allowed = np.ones(VOCAB, np.bool_)
        self.is_allowed[list(refused)] = False
        self.taken: list[int] = []
        self.is_free = False

    def allowed(self) -> BoolArray:
        return self.is_allowed

    def permits(self, token_id: int) -> bool:
        return bool(self.is_allowed[token_id])

    def take(self, token_id: int) -> None:
        self.taken.append(token_id)


def decode(*requests: Request) -> dict[int, Finished]:
    kv_cache = make_kv_cache(512)
    decoder = causal_decoder(HashModel(kv_cache, 64), kv_cache, 64)
    events = decoded(decoder, requests)
    return {event.request: event for event in events if isinstance(event, Finished)}


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.3, "top_k": 5}, {"logprobs": 2, "presence_penalty": 0.5}]
)
def test_a_mask_that_allows_all_changes_nothing(params: dict[str, Any]) -> None:
    plain = [
        Request(id=i, prompt=[1, 2, 4 + i], params=SamplingParams(max_tokens=30, **params), seed=i)
        for i in range(3)
    ]
    masked = [replace(request, mask=All()) for request in plain]
    free = decode(*plain)
    assert decode(*masked) == free
    mixed = [masked[0], *plain[1:]]
    assert decode(*mixed) == free
    assert masked[0].mask.taken == [*free[0].token_ids] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "top_p": 0.9}])
def test_what_a_mask_refuses_is_never_chosen(params: dict[str, Any]) -> None:
    for seed in range(5):
        mask = All(*range(7))
        request = Request(
            prompt=[1, 2],
            params=SamplingParams(max_tokens=40, **params),
            seed=seed,
            mask=mask,
            eos_token_ids=(HASH_EOS,),
        )
        [finished] = decode(request).values()
        assert len(finished.token_ids) == 40 and min(finished.token_ids) >= 7
        assert mask.taken == [*finished.token_ids]


def test_only_autoregressive_decoding_follows_a_mask() -> None:
    kv_cache = make_kv_cache(512)
    decoder = blocks_decoder(HashModel(kv_cache, 64), kv_cache, 19, 64)
    request = Request(prompt=[1], params=SamplingParams(max_tokens=8), mask=All())
    with pytest.raises(UnsupportedError, match="only autoregressive"):
        decoder.add(request)


def test_another_tokenizer_than_bytes_is_refused_not_guessed() -> None:
    import tokenizers
    from tokenizers.models import WordLevel

    words = Tokenizer(tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), {}, None)
    with pytest.raises(CheckpointError, match="cannot be guided"):
        grammars_of(words, eos_token_ids=(1,)).applied(
            Request(prompt=[0], params=SamplingParams()), Constraint.regex("a")
        )
    assert make_tokenizer().as_json().startswith("{")


def test_parameters_that_refer_to_a_large_schema_make_no_copy_each() -> None:
    large = {"type": "string", "description": "x" * 100_000}
    members = {f"p{i}": {"$ref": "#/$defs/number"} for i in range(1000)}
    schema = {"properties": members, "$defs": {"large": large, "number": {"type": "integer"}}}
    wanted = AnswerForm(None, [Tool("f", "", schema)], must_call=True, is_single=True)
    with pytest.raises(UsageError, match=r"at least \d{6} characters"):
        grammar_text(CODER.tokenizer, [], wanted)
