"""Constrained answers: JSON of a schema, a regular expression, a grammar or a tool call.

llguidance computes the allowed tokens before each token. A request's form is bounded in size and in
its chains of references, its compilation in time and memory (`grammar_compiler.py`). Diffusion
models have no constrained answers: they write many tokens at a time, in any order.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from llguidance import LLTokenizer

from lowtide.config import ModelConfig
from lowtide.decode.request import Request
from lowtide.errors import LowtideError, UnsupportedError, UsageError
from lowtide.model_folder.tokenizer import Tokenizer, blamed
from lowtide.parsing.channels import CALL, has_channels
from lowtide.parsing.thoughts import is_thinking
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
    enforces_text,
    grammar_text,
    openings,
)
from lowtide.serve.lark_text import check_length


class Grammars:
    """Makes the token masks of one model's requests.

    Owns the vocabulary in llguidance's form, which takes a second to build for a large model.
    """

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer | None, blame_s: float = 1.0
    ) -> None:
        """blame_s: time limit for finding out which of a request's tools are refused."""
        self._config, self._tokenizer, self._blame_s = config, tokenizer, blame_s
        self._made_vocabulary: LLTokenizer | None = None
        self._making = threading.Lock()
        self._compiler = GrammarCompiler(self._vocabulary, self._vocabulary_facts)

    def warm_up(self) -> None:
        """Build the vocabulary and start the compiler, so that the first grammar need not wait.

        This holds Python's interpreter lock.
        """
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
        """Return the request with a token mask if its answer is constrained; compile as needed.

        tools: the tools that may be called.
        tool_choice: auto, required, or the name of the tool that must be called.
        is_gone: once set, no further compilation starts.
        on_unguided: receives the reason if optional calls cannot be held to their schemas, or
        a tool's text not to its grammar.

        With `auto`, a call is held to its tool's schema from its beginning on. Raises UsageError
        for a required form that does not compile within the bounds, UnsupportedError for a
        diffusion model, and QueueFull.
        """
        chosen = [t for t in tools if tool_choice in ("auto", "required", t.name)]
        self._check(constraint, tool_choice, chosen, any(tool.strict for tool in chosen))
        tokenizer = self._tokenizer
        if not self._config.decoding.writes_in_order or tokenizer is None:
            return request
        check_length(sum(len(tool.grammar) for tool in chosen))  # before they are rewritten
        must_call = tool_choice not in ("auto", "none")
        wanted = AnswerForm(constraint, chosen, must_call, not parallel_calls)
        request, reason = self._guided(request, tokenizer, wanted, is_gone)
        # The schemas' reasons may be long, and a header's end is cut off.
        reasons = [each for each in (_free_texts(tokenizer, chosen), reason) if each]
        if reasons:
            on_unguided(" ".join(reasons))
        return request

    def _guided(
        self,
        request: Request,
        tokenizer: Tokenizer,
        wanted: AnswerForm,
        is_gone: threading.Event | None,
    ) -> tuple[Request, str]:
        """Return the request with its mask, and why optional calls go without their schemas."""
        is_free = wanted.text is None and not wanted.must_call
        if is_free and not any(t.strict or enforces_text(tokenizer, t) for t in wanted.tools):
            if not wanted.tools:
                return request, ""
            try:
                return self._call_masked(request, tokenizer, wanted, is_gone), ""
            except (LowtideError, Refusal) as error:  # such calls may also go unguided
                return request, str(error)
        if request.params.ignore_eos:
            raise UsageError("ignore_eos goes on after an answer's form: leave one of them out.")
        others = [] if wanted.must_call else wanted.tools
        optional = [tool for tool in others if not (tool.strict or tool.grammar)]
        try:
            return self._masked(request, tokenizer, wanted, is_gone), ""
        except (LowtideError, Refusal) as error:
            if not optional:
                raise
            reason = str(error)
        refused = self._refused(tokenizer, wanted._replace(tools=optional), is_gone)
        if 0 < len(refused) < len(optional):
            with suppress(LowtideError, Refusal):
                masked = self._masked(request, tokenizer, _eased(wanted, refused), is_gone)
                return masked, _refusals_text(refused)
        names = [tool.name for tool in optional]
        masked = self._masked(request, tokenizer, _eased(wanted, names), is_gone)
        return masked, _refusals_text({name: refused.get(name, reason) for name in names})

    def _refused(
        self, tokenizer: Tokenizer, wanted: AnswerForm, is_gone: threading.Event | None
    ) -> dict[str, str]:
        """Return the tools whose schemas are refused on their own, and why, found by bisection.

        If the time is over, all tools that were not tried yet are among them.
        """
        end_s = time.monotonic() + self._blame_s
        found, parts = dict[str, str](), [wanted.tools]
        while parts:
            part = parts.pop()
            is_late = time.monotonic() >= end_s
            reason = "There was no time to try each tool by itself."
            if not is_late:
                try:
                    _check_depths(part)
                    self._compiled_openings(tokenizer, wanted._replace(tools=part), is_gone)
                    continue
                except UsageError as error:
                    reason = str(error)
                except Refusal as error:  # of the queue: others would wait as long
                    is_late, reason = True, str(error)
            if is_late or len(part) == 1:
                found.update((tool.name, reason) for tool in part)
            else:
                half = len(part) // 2
                parts += [part[half:], part[:half]]
        return found

    def _masked(
        self,
        request: Request,
        tokenizer: Tokenizer,
        wanted: AnswerForm,
        is_gone: threading.Event | None,
    ) -> Request:
        _check_depths(wanted.tools)
        with self._named(tokenizer, wanted, is_gone):
            text = grammar_text(tokenizer, request.prompt, wanted)
            made = self._compiled(text, wanted, is_gone)
            mask = GrammarMask(made, self._config.vocab_size)
        return replace(request, mask=mask)

    def _call_masked(
        self,
        request: Request,
        tokenizer: Tokenizer,
        wanted: AnswerForm,
        is_gone: threading.Event | None,
    ) -> Request:
        """Mask optional calls. Raise UsageError or Refusal if they cannot be compiled."""
        _check_depths(wanted.tools)
        with self._named(tokenizer, wanted, is_gone):
            compiled = self._compiled_openings(tokenizer, wanted, is_gone)
        mask = CallMask(
            tokenizer,
            self._vocabulary(),
            self._config.vocab_size,
            compiled,
            is_thinking(tokenizer, request.prompt),
        )
        return replace(request, mask=mask)

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
        """Add the name of the tool at fault to a refusal."""
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
        """Return the name of a tool that is refused on its own, found by bisection, or ""."""
        end_s = time.monotonic() + self._blame_s

        def is_refused(tools: Sequence[Tool]) -> bool:
            only = AnswerForm(None, tools, wanted.must_call, wanted.is_single)
            try:
                self._compiled_openings(tokenizer, only, is_gone)
            except UsageError:
                return True
            return False

        found = [wanted.tools] if wanted.tools and is_refused(wanted.tools) else []
        while found and len(found[0]) > 1:
            if time.monotonic() >= end_s:
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
        """Raise UnsupportedError or UsageError for a form that cannot be enforced."""
        asked = [] if constraint is None else ["`response_format`"]
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
        """Return llguidance's form of the tokenizer. Raise UnsupportedError or CheckpointError."""
        with self._making:
            if self._made_vocabulary is None:
                facts = self._vocabulary_facts()
                failure = "This model's tokenizer cannot be guided by a grammar"
                with blamed(failure, "Leave `response_format`, strict and tool_choice out"):
                    self._made_vocabulary = LLTokenizer(
                        facts["tokenizer"], n_vocab=facts["vocab_size"], eos_token=facts["ends"]
                    )
            return self._made_vocabulary

    def _vocabulary_facts(self) -> dict[str, Any]:
        """Return what both processes build the vocabulary from. Raise UnsupportedError."""
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
    """Raise UsageError if the finished answer's grammar became too complex to enforce."""
    if isinstance(request.mask, GrammarMask) and request.mask.failure:
        raise UsageError(f"The answer's form could not be kept to: {request.mask.failure}.")


def _eased(wanted: AnswerForm, names: Collection[str]) -> AnswerForm:
    """Accept any object as the arguments of some tools that need not fit their schemas."""
    tools = [
        replace(tool, parameters={"type": "object"})
        if tool.name in names and not (tool.strict or tool.grammar)
        else tool
        for tool in wanted.tools
    ]
    return wanted._replace(tools=tools)


def _free_texts(tokenizer: Tokenizer, tools: Iterable[Tool]) -> str:
    """Say which tools' texts are not held to their grammars, or return ""."""
    free = [tool for tool in tools if tool.grammar and not enforces_text(tokenizer, tool)]
    names = ", ".join(f"{tool.name!r:.80}" for tool in free)
    reason = (
        "This model writes texts as JSON strings; these grammars cannot be rewritten for those."
    )
    return names and f"Not held to their grammars: {names}. {reason}"


def _refusals_text(reasons: Mapping[str, str]) -> str:
    """Say which tools are not held to their schemas, by name, each group with its reason."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(f"{name!r:.80}")
    each = (f"{', '.join(names)}. {reason}" for reason, names in groups.items())
    return f"Not held to their schemas: {' Nor '.join(each)}"


def _check_depths(tools: Iterable[Tool]) -> None:
    for tool in tools:
        check_depth(tool.parameters, f"The schema of {tool.name!r:.80}")


def _check_chains(wanted: AnswerForm) -> None:
    """Raise UsageError if the request's own schemas and grammars have too long reference chains."""
    form = wanted.text
    if form is not None and form.kind == "json_schema":
        check_schema(json.loads(form.text), "The JSON schema")
    elif form is not None:
        check_lark(form.text, "The grammar")
    for tool in wanted.tools:
        check_schema(tool.parameters, f"The schema of {tool.name!r:.80}")
        check_lark(tool.grammar, f"The grammar of {tool.name!r:.80}")
