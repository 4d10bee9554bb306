"""Answers that are certain to have a form: JSON of a schema, a regular expression, a grammar.

llguidance says before each token which ones may come. What a request brings is bounded in size and
in its chains of references, what it compiles to in time and room (`grammar_compiler.py`). Diffusion
models, which write many tokens at a time and in any order, have none of it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from llguidance import LLTokenizer

from lowtide.config import ModelConfig
from lowtide.decode.request import Request
from lowtide.errors import LowtideError, UnsupportedError, UsageError
from lowtide.model_folder.tokenizer import Tokenizer, blamed
from lowtide.parsing import has_thoughts, is_thinking
from lowtide.parsing.channels import CALL, has_channels
from lowtide.parsing.tools import Tool
from lowtide.serve.call_mask import CallMask
from lowtide.serve.errors import Refusal
from lowtide.serve.grammar_chains import check_lark, check_schema
from lowtide.serve.grammar_compiler import Compiled, GrammarCompiler
from lowtide.serve.grammar_mask import GrammarMask
from lowtide.serve.grammar_text import (
    AnswerForm,
    Constraint,
    Opening,
    check_depth,
    check_length,
    enforces_text,
    grammar_text,
    openings,
)

_BLAME_S = 1.0
"""Time for finding which of a request's tools is refused."""


class Grammars:
    """Maker of masks for the requests of one model.

    Owns llguidance's form of its vocabulary, which takes a second to make of a large one.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._made_vocabulary: LLTokenizer | None = None
        self._making = threading.Lock()
        self._compiler = GrammarCompiler(self._vocabulary, self._vocabulary_facts)

    def warm_up(self) -> None:
        """Makes ready what the first grammar would wait for. It holds the interpreter's lock."""
        if self._config.decoding.writes_in_order and self._tokenizer is not None:
            with suppress(LowtideError):  # the first grammar is told of it
                self._vocabulary()
                threading.Thread(target=self._compiler.warm_up, daemon=True).start()

    def applied(
        self,
        request: Request,
        constraint: Constraint | None,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        parallel_calls: bool = True,
        is_gone: threading.Event | None = None,
        on_unguided: Callable[[str], None] = lambda reason: None,
    ) -> Request:
        """The request with a mask, or as it is where any answer will do; compiles meanwhile.

        tools: that may be called; tool_choice: auto, required, or the name of one that must be.
        A call is of its tool's schema: where none need be made, from its beginning on. is_gone:
        once it is set nothing is begun any more. on_unguided: told why calls that need not be made
        are not held to their schemas. Raises UsageError for what cannot be compiled within the
        bounds and must be, UnsupportedError for a diffusion model, QueueFull.
        """
        is_free = tool_choice in ("auto", "none")
        chosen = [t for t in tools if tool_choice in ("auto", "required", t.name)]
        is_strict = any(tool.strict for tool in chosen)
        self._check(constraint, tool_choice, chosen, is_strict)
        tokenizer = self._tokenizer
        if not self._config.decoding.writes_in_order or tokenizer is None:
            return request
        has_grammar = any(enforces_text(tokenizer, tool) for tool in chosen)
        if constraint is None and is_free and not is_strict and not has_grammar:
            if not chosen:
                return request
            try:
                mask = self._call_mask(request, tokenizer, chosen, parallel_calls, is_gone)
            except (LowtideError, Refusal) as error:
                on_unguided(str(error))
                return request
            return replace(request, mask=mask)
        if request.params.ignore_eos:
            raise UsageError("ignore_eos goes on behind an answer's form: leave one of them out.")
        wanted = AnswerForm(constraint, chosen, not is_free, not parallel_calls)
        lenient = [_as_enforced(tool, is_free) for tool in chosen]
        if lenient != chosen:
            try:
                return self._masked(request, tokenizer, wanted, is_gone)
            except (LowtideError, Refusal) as error:
                wanted, reason = wanted._replace(tools=lenient), str(error)
            masked = self._masked(request, tokenizer, wanted, is_gone)
            on_unguided(reason)
            return masked
        return self._masked(request, tokenizer, wanted, is_gone)

    def _masked(
        self,
        request: Request,
        tokenizer: Tokenizer,
        wanted: AnswerForm,
        is_gone: threading.Event | None,
    ) -> Request:
        for tool in wanted.tools:
            check_depth(tool.parameters, f"The schema of {tool.name!r:.80}")
        with self._named(tokenizer, wanted, is_gone):
            text = grammar_text(tokenizer, request.prompt, wanted)
            made = self._compiled(text, wanted, is_gone)
            mask = GrammarMask(made, self._config.vocab_size)
        return replace(request, mask=mask)

    def _call_mask(
        self,
        request: Request,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        parallel_calls: bool,
        is_gone: threading.Event | None,
    ) -> CallMask:
        """Raises UsageError for what cannot be compiled, Refusal where nothing can be."""
        for tool in tools:
            check_depth(tool.parameters, f"The schema of {tool.name!r:.80}")
        wanted = AnswerForm(None, tools, False, not parallel_calls)
        with self._named(tokenizer, wanted, is_gone):
            compiled = self._compiled_openings(tokenizer, wanted, is_gone)
        return CallMask(
            tokenizer,
            self._vocabulary(),
            self._config.vocab_size,
            compiled,
            has_thoughts(tokenizer) and is_thinking(tokenizer, request.prompt),
        )

    def _compiled_openings(
        self, tokenizer: Tokenizer, wanted: AnswerForm, is_gone: threading.Event | None
    ) -> list[tuple[Opening, Compiled]]:
        compiled = []
        for opening in openings(tokenizer, wanted.tools, wanted.is_single):
            made = self._compiled(opening.grammar, wanted, is_gone)
            if made.refusal:
                raise UsageError(made.refusal)
            compiled.append((opening, made))
        return compiled

    @contextmanager
    def _named(
        self, tokenizer: Tokenizer, wanted: AnswerForm, is_gone: threading.Event | None
    ) -> Iterator[None]:
        """Add to a refusal the name of the tool that is at fault."""
        try:
            yield
        except UsageError as error:
            name = ""
            with suppress(Refusal):  # a full queue hides the name, not the reason
                name = self._at_fault(tokenizer, wanted, is_gone)
            if not name or f"{name!r:.80}" in str(error):
                raise
            raise UsageError(f"Tool {name!r:.80}: {error}") from error

    def _at_fault(
        self, tokenizer: Tokenizer, wanted: AnswerForm, is_gone: threading.Event | None
    ) -> str:
        """Return the name of a tool that is refused by itself, found by halves; "" for none."""
        end_s = time.monotonic() + _BLAME_S

        def is_refused(tools: Sequence[Tool]) -> bool:
            only = AnswerForm(None, tools, wanted.must_call, wanted.is_single)
            try:
                self._compiled_openings(tokenizer, only, is_gone)
            except UsageError:
                return True
            return False

        found = [wanted.tools] if wanted.tools and is_refused(wanted.tools) else []
        while found and len(found[0]) > 1:
            if time.monotonic() > end_s:
                return ""
            half = len(found[0]) // 2
            found = [part for part in (found[0][:half], found[0][half:]) if is_refused(part)]
        return found[0][0].name if found else ""

    def _compiled(self, text: str, wanted: AnswerForm, is_gone: threading.Event | None) -> Compiled:
        check_length(len(text))
        if not self._compiler.is_known(text):
            _check_chains(wanted)
            self._vocabulary()  # what is wrong with it is told here
        return self._compiler.compiled(text, is_gone)

    def _check(
        self, constraint: Constraint | None, choice: str, chosen: Sequence[Tool], is_strict: bool
    ) -> None:
        """Raises UnsupportedError or UsageError for what is asked and cannot be kept to."""
        asked = [] if constraint is None else ["response_format"]
        if choice not in ("auto", "none"):
            asked.append(f"tool_choice {choice!r:.80}")
            if not chosen:
                raise UsageError(f"There is no tool for tool_choice {choice!r:.80}.")
        if is_strict:
            asked.append("strict")
        if asked and not self._config.decoding.writes_in_order:
            raise UnsupportedError(
                f"{', '.join(asked)}: {self._config.architecture} writes its tokens in any order, "
                "so no grammar can guide them; leave it out. Tools without it are served."
            )
        if asked and self._tokenizer is None:
            raise UnsupportedError(f"{', '.join(asked)}: this model has no tokenizer.")

    def _vocabulary(self) -> LLTokenizer:
        """Llguidance's form of the tokenizer. Raises UnsupportedError or CheckpointError."""
        with self._making:
            if self._made_vocabulary is None:
                facts = self._vocabulary_facts()
                failure = "This model's tokenizer cannot be guided by a grammar"
                with blamed(failure, "Leave response_format, strict and tool_choice out"):
                    self._made_vocabulary = LLTokenizer(
                        facts["tokenizer"], n_vocab=facts["vocab_size"], eos_token=facts["ends"]
                    )
            return self._made_vocabulary

    def _vocabulary_facts(self) -> dict[str, Any]:
        """What it is made of, here and in the compiler's child. Raises UnsupportedError."""
        ends, tokenizer = list(self._config.eos_token_ids), self._tokenizer
        if tokenizer is None:
            raise UnsupportedError("This model has no tokenizer, so there is no text to form.")
        if has_channels(tokenizer):  # the end of a call is of the grammar itself
            ends = [token for token in ends if token != tokenizer.token_id(CALL)]
        if not ends:
            raise UnsupportedError(
                "This model names no token that ends a text, so none can end where its form does."
            )
        vocab_size = self._config.vocab_size
        return {"tokenizer": tokenizer.as_json(), "vocab_size": vocab_size, "ends": ends}


def check_kept(request: Request) -> None:
    """After an answer: raises UsageError where its form became too complex to be kept to."""
    if isinstance(request.mask, GrammarMask) and request.mask.failure:
        raise UsageError(f"The answer's form could not be kept to: {request.mask.failure}.")


def _as_enforced(tool: Tool, is_free: bool) -> Tool:
    """A tool that may be called, and need not be strict about it, takes any object."""
    if not is_free or tool.strict or tool.grammar:
        return tool
    return replace(tool, parameters={"type": "object"})


def _check_chains(wanted: AnswerForm) -> None:
    """Raises UsageError for one that is too long, in what the request itself brings."""
    form = wanted.text
    if form is not None and form.kind == "json_schema":
        check_schema(json.loads(form.text), "The JSON schema")
    elif form is not None:
        check_lark(form.text, "The grammar")
    for tool in wanted.tools:
        check_schema(tool.parameters, f"The schema of {tool.name!r:.80}")
        check_lark(tool.grammar, f"The grammar of {tool.name!r:.80}")
