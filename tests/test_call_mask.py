"""A grammar that begins with a call: free before it, the tools' schemas in it, free behind it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hash_model import EOS as HASH_EOS
from hash_model import HashModel, make_kv_cache
from kind_decoders import causal_decoder
from small_tokenizers import CODER, EOS, FORMATS, GPT_OSS, QWEN, CallFormat
from test_serve_grammar import (
    COLOUR,
    STOP,
    TOOLS,
    grammars_of,
    nested_schema,
    new_grammars,
    request_of,
)
from whole import decoded

from lowtide.decode.request import Finished, Request
from lowtide.errors import UsageError
from lowtide.params import SamplingParams
from lowtide.parsing import parser_of
from lowtide.parsing.call_forms import call_form_of
from lowtide.parsing.pieces import CallArguments, CallBegun
from lowtide.parsing.tools import Tool
from lowtide.serve.call_mask import CallMask
from lowtide.serve.grammar_mask import GrammarMask

SAID = "Let me paint, <tool or [TOOL.\n"


def mask_of(form: CallFormat, tools: Sequence[Tool] = TOOLS, **asked: Any) -> CallMask:
    request = request_of(form.tokenizer, form.prompt)
    unguided: list[str] = []
    made = grammars_of(form.tokenizer).applied(
        request, None, tools, on_unguided=unguided.append, **asked
    )
    assert isinstance(made.mask, CallMask) and not unguided
    return made.mask


def said_before(form: CallFormat) -> str:
    if form is not GPT_OSS:
        return SAID
    return f"<|channel|>analysis<|message|>to=functions.paint {SAID}<|end|><|start|>assistant"


def begin_of(form: CallFormat, text: str) -> int:
    """The number of characters to the end of the mark that begins a call."""
    mark = "to=functions." if form is GPT_OSS else call_form_of(form.tokenizer).begin
    return text.index(mark) + len(mark)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_free_before_a_call_and_behind_it(form: CallFormat) -> None:
    mask, encode = mask_of(form), form.tokenizer.encode
    call = form.text(("paint", {"colour": "red", "n": 2}))
    for token in encode(said_before(form)):
        assert mask.is_free and mask.allowed().all()
        mask.take(token)
    begin = begin_of(form, call)
    for token in encode(call[:begin]):
        assert mask.is_free
        mask.take(token)
    for token in encode(call[begin:]):
        assert not mask.is_free
        allowed = mask.allowed()
        assert allowed[token] and not allowed[EOS]
        mask.take(token)
    assert mask.is_free
    if form is GPT_OSS:
        return
    for token in encode(f"\nAnd now {call}"):
        assert mask.is_free or mask.allowed()[token]
        mask.take(token)
    assert mask.is_free


def permitted(mask: CallMask) -> list[int]:
    """Of masks alone, and of tokens that are looked at one by one, as at temperature 0."""
    found = [token for token in range(len(mask.allowed())) if mask.permits(token)]
    return found or np.flatnonzero(mask.allowed()).tolist()


def allowed(mask: CallMask) -> list[int]:
    found: list[int] = np.flatnonzero(mask.allowed()).tolist()
    return found


@pytest.mark.parametrize("choices_of", [allowed, permitted])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call_that_has_begun_is_of_its_tool_s_schema(
    form: CallFormat, choices_of: Callable[[CallMask], list[int]]
) -> None:
    """Whatever is drawn behind the mark."""
    call = form.text(("paint", {"colour": "red", "n": 2}))
    start = call[: begin_of(form, call)]
    for seed in range(6):
        mask, chance = mask_of(form), random.Random(seed)
        ids = form.tokenizer.encode(said_before(form) + start)
        for token in ids:
            mask.take(token)
        while not mask.is_free:
            ids.append(chance.choice(choices_of(mask)))
            mask.take(ids[-1])
            assert len(ids) < 3000
        parser = parser_of(form.tokenizer, form.tokenizer.encode(form.prompt), TOOLS)
        pieces = [*parser.feed(ids), *parser.finish()]
        names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
        assert names and set(names) <= {"paint", "stop"}
        if len(names) == 1:
            parts = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
            value = json.loads("".join(parts))
            if names == ["paint"]:
                assert value["colour"] in ("red", "green") and value["n"] in (1, 2)
            else:
                assert value == {}


def test_a_mark_in_thoughts_begins_nothing() -> None:
    mask = mask_of(QWEN)
    for token in QWEN.tokenizer.encode("<think>hm <tool_call> {</think>\n\n"):
        mask.take(token)
        assert mask.is_free
    mask.take(QWEN.tokenizer.encode("<tool_call>")[0])
    assert not mask.is_free


def test_a_call_whose_first_mark_was_forgotten() -> None:
    mask, encode = mask_of(CODER), CODER.tokenizer.encode
    for token in encode("Now <function="):
        assert mask.is_free
        mask.take(token)
    rest = (
        "paint>\n<parameter=colour>\nred\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>"
    )
    for token in encode(rest):
        assert not mask.is_free and mask.allowed()[token]
        mask.take(token)
    assert mask.is_free


def test_a_function_in_the_header_before_its_channel() -> None:
    mask = mask_of(GPT_OSS)
    text = " to=functions.stop<|channel|>commentary json<|message|>{}<|call|>"
    for token in GPT_OSS.tokenizer.encode(text):
        assert mask.is_free or mask.allowed()[token]
        mask.take(token)
    assert mask.is_free


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "http://example.org"}}},
        {"properties": {"a": {"type": "string", "pattern": "(("}}},
        {"properties": {"a": {"type": "string", "allOf": [{"pattern": "(?=a)"}]}}},
        nested_schema(70),
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(999)},
        },
        {"enum": ["a" * 300_000]},
    ],
)
def test_a_schema_that_cannot_be_compiled_is_told_and_no_refusal(schema: dict[str, Any]) -> None:
    unguided: list[str] = []
    request = request_of(QWEN.tokenizer)
    made = grammars_of(QWEN.tokenizer).applied(
        request, None, (STOP, Tool("f", "", schema)), on_unguided=unguided.append
    )
    assert made is request and len(unguided) == 1 and unguided[0]


def test_no_mask_is_computed_before_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the words are those without one."""
    kv_cache = make_kv_cache(512)
    plain = Request(prompt=[1, 2], params=SamplingParams(max_tokens=40), eos_token_ids=(HASH_EOS,))
    num_asked = 0
    allowed = CallMask.allowed

    def counted(self: CallMask) -> Any:
        nonlocal num_asked
        num_asked += 1
        return allowed(self)

    monkeypatch.setattr(CallMask, "allowed", counted)
    ids = []
    for mask in (None, mask_of(QWEN)):
        request = Request(**{**_fields(plain), "mask": mask})
        decoder = causal_decoder(HashModel(kv_cache, 64), kv_cache, 64)
        events = decoded(decoder, [request])
        ids += [event.token_ids for event in events if isinstance(event, Finished)]
    assert ids[0] == ids[1] and not num_asked


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("prompt", "params", "eos_token_ids")}


IMPOSSIBLE = {
    "deep": nested_schema(70),
    "chain": {
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(999)},
    },
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_strict_tool_beside_one_that_cannot_be_compiled(form: CallFormat, kind: str) -> None:
    """Only that one goes without its schema, and is named; the others' hold."""
    tools = [replace(COLOUR, strict=True), replace(COLOUR, name="mix"), STOP]
    tools.insert(len(form.name) % 4, Tool("odd", "", IMPOSSIBLE[kind]))
    right, wrong = {"colour": "red", "n": 2}, {"colour": "blue", "n": 2}
    said = (
        SAID if form is not GPT_OSS else "<|channel|>analysis<|message|>x<|end|><|start|>assistant"
    )
    grammars = grammars_of(form.tokenizer)
    for name, arguments, is_right in (
        ("paint", right, True),
        ("paint", wrong, False),
        ("mix", right, True),
        ("mix", wrong, False),
        ("odd", wrong, True),
    ):
        unguided: list[str] = []
        made = grammars.applied(
            request_of(form.tokenizer, form.prompt), None, tools, on_unguided=unguided.append
        )
        assert isinstance(made.mask, GrammarMask)
        text = said + form.text((name, arguments))
        assert fits(made.mask, form.tokenizer.encode(text)) == is_right
        [told] = unguided
        assert told.startswith("Not held to their schemas: 'odd'. The schema of 'odd'")


def fits(mask: GrammarMask, ids: Sequence[int]) -> bool:
    for token in ids:
        if not mask.allowed()[token]:
            return False
        mask.take(token)
    return True


def test_of_several_tools_that_cannot_be_compiled_a_strict_one_is_refused_by_name() -> None:
    tools = [replace(COLOUR, name=f"tool_{i}") for i in range(6)]
    for place in (1, 4):
        tools[place] = replace(tools[place], parameters=IMPOSSIBLE["chain"])
    asked = (request_of(QWEN.tokenizer), None)
    strict = replace(tools[1], strict=True)
    with pytest.raises(UsageError, match="'tool_1'"):
        grammars_of(QWEN.tokenizer).applied(*asked, [tools[0], strict, *tools[2:]])
    unguided: list[str] = []
    tools[5] = replace(tools[5], strict=True)
    grammars_of(QWEN.tokenizer).applied(*asked, tools, on_unguided=unguided.append)
    first, second = unguided[0].removeprefix("Not held to their schemas: ").split(" Nor ")
    for told, name in ((first, "tool_1"), (second, "tool_4")):
        assert told.startswith(f"'{name}'. The schema of '{name}' has a chain of")


def test_tools_that_there_was_no_time_to_try_are_told_so() -> None:
    """The reason of another tool is not theirs."""
    tools = [replace(COLOUR, strict=True), replace(COLOUR, name="mix"), STOP]
    tools.append(Tool("odd", "", IMPOSSIBLE["chain"]))
    unguided: list[str] = []
    made = new_grammars(QWEN.tokenizer, blame_s=0).applied(
        request_of(QWEN.tokenizer), None, tools, on_unguided=unguided.append
    )
    assert isinstance(made.mask, GrammarMask)
    [told] = unguided
    assert told == (
        "Not held to their schemas: 'mix', 'stop', 'odd'. There was no time to try each tool by "
        "itself."
    )
    for name, colour, is_right in (
        ("paint", "red", True),
        ("paint", "blue", False),
        ("mix", "blue", True),
    ):
        made = new_grammars(QWEN.tokenizer, blame_s=0).applied(
            request_of(QWEN.tokenizer), None, tools
        )
        assert isinstance(made.mask, GrammarMask)
        text = SAID + QWEN.text((name, {"colour": colour, "n": 2}))
        assert fits(made.mask, QWEN.tokenizer.encode(text)) == is_right
