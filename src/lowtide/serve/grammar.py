"""Answers that are certain to have a form: JSON of a schema, a regular expression, a grammar.

llguidance says before each token which ones may come. What a request brings is bounded in size,
what it compiles to in time and room. Diffusion models, which write many tokens at a time and in
any order, have none of it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from lowtide.config import ModelConfig
from lowtide.core import BoolArray
from lowtide.decode.request import Request
from lowtide.errors import UnsupportedError, UsageError
from lowtide.files.json_file import printable
from lowtide.model_folder.tokenizer import Tokenizer, blamed
from lowtide.parsing.channels import CALL, has_channels
from lowtide.parsing.tools import Tool
from lowtide.serve.errors import QueueFull
from lowtide.serve.grammar_text import (
    MAX_GRAMMAR_CHARS,
    AnswerForm,
    Constraint,
    check_depth,
    enforces_text,
    grammar_text,
)

MAX_COMPILE_S = 10.0
MAX_TURN_S = 60.0
"""What a form waits until those before it are compiled: their time is not its own."""
POLL_S = 0.5
"""How soon one that waits hears that its client is gone."""

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,  # a step is on the engine's thread: tens of milliseconds at worst
    max_lexer_states=50_000,  # of 1 to 2 kB
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Grammars:
    """Makes masks for the requests of one model. Owns llguidance's form of its vocabulary, which
    takes a second to make. One is compiled at a time, each by a thread that then ends."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._turn = threading.Lock()

    def applied(
        self,
        request: Request,
        constraint: Constraint | None,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        parallel_calls: bool = True,
        is_gone: threading.Event | None = None,
    ) -> Request:
        """The request with a mask, or as it is where any answer will do; compiles meanwhile.

        tools: that may be called; tool_choice: auto, required, or the name of one that must be.
        Arguments are of a tool's schema where it is `strict` or must be called. is_gone: once it is
        set nothing is begun any more. Raises UsageError for what cannot be compiled within the
        bounds, UnsupportedError for a diffusion model, QueueFull.
        """
        is_free = tool_choice in ("auto", "none")
        chosen = [t for t in tools if tool_choice in ("auto", "required", t.name)]
        is_strict = any(tool.strict for tool in chosen)
        self._check(constraint, tool_choice, chosen, is_strict)
        tokenizer = self._tokenizer
        if self._config.is_diffusion or tokenizer is None:
            return request
        has_grammar = any(enforces_text(tokenizer, tool) for tool in chosen)
        if constraint is None and is_free and not is_strict and not has_grammar:
            return request
        if request.params.ignore_eos:
            raise UsageError("ignore_eos goes on behind an answer's form: leave one of them out.")
        called = [_as_enforced(tool, is_free) for tool in chosen]
        wanted = AnswerForm(constraint, called, not is_free, not parallel_calls)
        text = grammar_text(tokenizer, request.prompt, wanted)
        return replace(request, mask=self._compiled(text, is_gone or threading.Event()))

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
        if asked and self._config.is_diffusion:
            raise UnsupportedError(
                f"{', '.join(asked)}: {self._config.architecture} writes its tokens in any order, "
                "so no grammar can guide them; leave it out. Tools without it are served."
            )
        if asked and self._tokenizer is None:
            raise UnsupportedError(f"{', '.join(asked)}: this model has no tokenizer.")
        for tool in chosen:
            check_depth(tool.parameters, f"The schema of {tool.name!r:.80}")

    def _compiled(self, text: str, is_gone: threading.Event) -> GrammarMask:
        if len(text) > MAX_GRAMMAR_CHARS:
            raise UsageError(
                f"The form and its tools make a grammar of {len(text)} characters; at most "
                f"{MAX_GRAMMAR_CHARS} are accepted."
            )
        compiled: Future[GrammarMask] = Future()
        self._take_turn(is_gone)
        try:
            threading.Thread(
                target=self._compile, args=(text, compiled), name="lowtide-grammar", daemon=True
            ).start()
        except RuntimeError:  # the system has no thread
            self._turn.release()
            raise
        try:
            return compiled.result(MAX_COMPILE_S)
        except TimeoutError:
            raise UsageError(
                f"The answer's form was not compiled within {MAX_COMPILE_S:g} s; make it simpler."
            ) from None

    def _take_turn(self, is_gone: threading.Event) -> None:
        """Waits for those before it. Raises QueueFull where that takes long, or none waits."""
        end_s = time.monotonic() + MAX_TURN_S
        while not self._turn.acquire(timeout=min(POLL_S, MAX_TURN_S)):
            if is_gone.is_set() or time.monotonic() > end_s:
                raise QueueFull(
                    "Forms of other requests are being compiled. Ask again in 10 s.", 10
                )
        if is_gone.is_set():
            self._turn.release()
            raise QueueFull("Who asked for this form is gone.", 10)

    def _compile(self, text: str, compiled: Future[GrammarMask]) -> None:
        """Gives back the turn that `_compiled` took, however late."""
        try:
            compiled.set_result(self._mask(text))
        except BaseException as error:
            compiled.set_exception(error)
        finally:
            self._turn.release()

    def _mask(self, text: str) -> GrammarMask:
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=_LIMITS)
        mask = GrammarMask(matcher, self._config.vocab_size)
        mask.allowed()  # what is too complex from the beginning is refused here
        if mask.failure:
            raise UsageError(f"The answer's form cannot be kept to: {mask.failure}")
        return mask

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        """llguidance's form of the tokenizer. Raises UnsupportedError or CheckpointError."""
        ends, tokenizer = list(self._config.eos_token_ids), self._tokenizer
        if tokenizer is None:
            raise UnsupportedError("This model has no tokenizer, so there is no text to form.")
        if has_channels(tokenizer):  # the end of a call is of the grammar itself
            ends = [token for token in ends if token != tokenizer.token_id(CALL)]
        if not ends:
            raise UnsupportedError(
                "This model names no token that ends a text, so none can end where its form does."
            )
        failure = "This model's tokenizer cannot be guided by a grammar"
        with blamed(failure, "Leave response_format, strict and tool_choice out"):
            vocab_size = self._config.vocab_size
            return LLTokenizer(tokenizer.as_json(), n_vocab=vocab_size, eos_token=ends)


class GrammarMask:
    """Which tokens one answer may go on with: decoding's `TokenMask`.

    failure: why the form could not be kept to, or "". The answer then ends.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.failure = ""
        self._note_failure()

    def allowed(self) -> BoolArray:
        """See `TokenMask`."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._note_failure()
        is_allowed: BoolArray = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(
            np.bool_
        )
        return is_allowed

    def take(self, token_id: int) -> None:
        """See `TokenMask`."""
        self._matcher.consume_token(token_id)
        self._note_failure()

    def _note_failure(self) -> None:
        if not self.failure and self._matcher.is_error():
            self.failure = printable(self._matcher.get_error()[:500])


def check_kept(request: Request) -> None:
    """After an answer: raises UsageError where its form became too complex to be kept to."""
    if isinstance(request.mask, GrammarMask) and request.mask.failure:
        raise UsageError(f"The answer's form could not be kept to: {request.mask.failure}")


def _as_enforced(tool: Tool, is_free: bool) -> Tool:
    """A tool that may be called, and need not be strict about it, takes any object."""
    if not is_free or tool.strict or tool.grammar:
        return tool
    return replace(tool, parameters={"type": "object"})
