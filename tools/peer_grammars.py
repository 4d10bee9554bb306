"""llama.cpp's tests of grammars: which texts a schema or a grammar accepts and refuses.

Grammars in GBNF are written as Lark by llguidance's own converter, since lowtide takes Lark.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from peer_cpp import Reader, Unread

from lowtide.config import Causal
from lowtide.decode.request import Request
from lowtide.errors import UsageError
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.model_writing.synth_tokenizer import tokenizer_json
from lowtide.params import SamplingParams
from lowtide.serve.grammar import Grammars
from lowtide.serve.grammar_text import Constraint

FILES = ("test-grammar-integration.cpp", "test-grammar-llguidance.cpp")

_OTHERS = "llama.cpp's own test over llguidance says otherwise"

KNOWN = {
    ("min 0", "1" + "0" * 32): f"no schema bounds the digits of an integer; {_OTHERS}",
    ("min 2", "12345678900000000"): f"no schema bounds the digits of an integer; {_OTHERS}",
    ("min+max items", "1"): f"`items` says nothing of what is no list; {_OTHERS}",
    ("object properties", "direction"): f"other members are allowed by default; {_OTHERS}",
    ("required props", ""): f"uniqueItems cannot be kept to and is refused by name; {_OTHERS}",
    ("segfault", ""): "llguidance's converter writes no Lark for a repetition of a repetition",
}
"""Differences that stay, by a test's name and a part of the text: the reason."""

_EOS = 300
_NO_LIST = "prefixItems that is no list is no JSON Schema: refused by name, left out by llama.cpp"

SCHEMAS = {
    "string array": _NO_LIST,
    "array with empty items and prefixItems": _NO_LIST,
    "unsupported regexp in a property": "refused by name, left out by llama.cpp",
}
"""Schemas that are taken by one side alone, by a part of the test's name: the reason."""

_SCHEMA = re.compile(r'test\(\{\s*(SUCCESS|FAILURE),\s*("(?:[^"\\]|\\.)*"),\s*(R"+\()')
_TEST = re.compile(r"^\s*(test_schema|test_grammar)\(", re.MULTILINE)


class Case(NamedTuple):
    """One text under one grammar. refusal: why the grammar was not taken, or ""."""

    name: str
    text: str
    is_right: bool
    is_accepted: bool
    refusal: str


def run(llama: Path) -> int:
    """Print each difference and a sum; return 1 where one is not known."""
    counts: Counter[str] = Counter()
    for file in FILES:
        source = (llama / "tests" / file).read_text(encoding="utf-8")
        for case in _cases(source, is_lark="llguidance" in file, counts=counts):
            is_same = case.is_accepted == case.is_right and not case.refusal
            known = _is_known(case)
            counts["same" if is_same else "known" if known else "different"] += 1
            if not is_same and not known:
                wanted = "is to be accepted" if case.is_right else "is to be refused"
                print(f"{file}: {case.name}: {case.text!r} {wanted} {case.refusal}")
    source = (llama / "tests" / "test-json-schema-to-grammar.cpp").read_text(encoding="utf-8")
    _count_schemas(source, counts)
    for what, num in sorted(counts.items()):
        print(f"{num:5} {what}")
    return int(counts["different"] > 0 or counts["not read"] > 0)


def _is_known(case: Case) -> bool:
    if case.refusal:
        return "uniqueItems" in case.refusal or (case.name, "") in KNOWN
    return any(case.name == name and part and part in case.text for name, part in KNOWN)


def _count_schemas(source: str, counts: Counter[str]) -> None:
    """Compare which schemas make a grammar; llama.cpp's own grammars are not compared."""
    grammars, tokenizer = _grammars()
    for found in _SCHEMA.finditer(source):
        name, schema = (Reader(source, found.start(part)).expression() for part in (2, 3))
        try:
            _accepts(grammars, tokenizer, Constraint.json_schema(json.loads(schema)), "")
            refusal = ""
        except (UsageError, ValueError) as error:
            refusal = str(error)
        is_same = (found[1] == "SUCCESS") == (not refusal)
        known = next((reason for part, reason in SCHEMAS.items() if part in name), "")
        counts["same" if is_same else "known" if known else "different"] += 1
        if not is_same and not known:
            print(f"schema {name}: {found[1]} expected: {refusal or 'taken'}")


def _grammars() -> tuple[Grammars, Tokenizer]:
    backend = tokenizers.Tokenizer.from_str(tokenizer_json(_EOS))
    tokenizer = Tokenizer(backend, {"eos_token": "<|endoftext|>"}, None)
    model: Any = SimpleNamespace(
        vocab_size=tokenizer.vocab_size + 3,
        eos_token_ids=(_EOS,),
        decoding=Causal(),
        architecture="Bytes",
    )
    return Grammars(model, tokenizer), tokenizer


def _cases(source: str, is_lark: bool, counts: Counter[str]) -> Iterator[Case]:
    grammars, tokenizer = _grammars()
    for found in _TEST.finditer(source):
        try:
            name, grammar, passing, failing = Reader(source, found.end() - 1).arguments()
            texts = [(text, True) for text in passing.parts]
            texts += [(text, False) for text in failing.parts]
        except (Unread, ValueError, AttributeError):
            counts["definitions and what is not read"] += 1
            continue
        if found[1] == "test_grammar" and not is_lark:
            try:
                grammar = gbnf_to_lark(grammar)
            except GbnfToLarkError as error:
                counts["GBNF that is not converted"] += len(texts)
                print(f"{name}: {error}")
                continue
        for text, is_right in texts:
            try:
                constraint = _constraint(found[1], grammar)
                is_accepted, refusal = _accepts(grammars, tokenizer, constraint, text), ""
            except UsageError as error:
                is_accepted, refusal = False, str(error)
            yield Case(name, text, is_right, is_accepted, refusal)


def _constraint(kind: str, grammar: str) -> Constraint:
    if kind == "test_schema":
        return Constraint.json_schema(json.loads(grammar))
    return Constraint.lark(grammar)


def _accepts(grammars: Grammars, tokenizer: Tokenizer, constraint: Constraint, text: str) -> bool:
    request = Request(prompt=[1], params=SamplingParams())
    mask = grammars.applied(request, constraint).mask
    if mask is None:
        return True
    for token in tokenizer.encode(text, add_special=False):
        allowed = mask.allowed()
        if not allowed[token]:
            return False
        mask.take(token)
    return bool(np.asarray(mask.allowed())[_EOS])
