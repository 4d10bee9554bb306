"""One answer: asked for, shown while it is made, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from lowtide.cli.live import LiveView
from lowtide.cli.passes import pass_caption
from lowtide.cli.screen import can_redraw
from lowtide.cli.text import TextWriter, ThinkingWriter
from lowtide.params import SamplingParams, with_published

if TYPE_CHECKING:
    from lowtide.answers.completion import Completion, Usage
    from lowtide.decode.block_diffusion import Event
    from lowtide.llm import LLM

Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, chat messages


class Answer(NamedTuple):
    """What came of a prompt, one completion unless more were asked for, and the seconds from the
    request to the last token."""

    completions: list[Completion]
    generation_s: float

    @property
    def completion(self) -> Completion:
        """The first."""
        return self.completions[0]

    @property
    def usage(self) -> Usage:
        """The usage of all answers together; a receipt belongs to a single answer."""
        usages = [completion.usage for completion in self.completions]
        if len(usages) == 1:
            return usages[0]
        return replace(
            usages[0],
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            forwards=sum(usage.forwards for usage in usages),
            receipt=None,
        )


def ask(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    on_event: Callable[[Event], None] | None = None,
) -> Answer:
    """Generate, without showing anything."""
    start_s = time.perf_counter()
    completions = llm.generate([prompt], params, on_event)
    return Answer(completions, time.perf_counter() - start_s)


def ask_live(llm: LLM, prompt: Prompt, params: SamplingParams, view: LiveView) -> Answer:
    """Generate, drawing every block while it is filled; Ctrl-C leaves the text in `view`."""
    from lowtide.decode.block_diffusion import Committed, Draft

    def show(event: Event) -> None:
        if isinstance(event, Draft):
            view.draft(event.block_start, event.tokens, event.is_masked)
        elif isinstance(event, Committed):
            view.commit(event.tokens, event.text)

    with view:
        answer = ask(llm, prompt, params, show)
        view.finish(answer.completion.text)
    return answer


def ask_writing(llm: LLM, prompt: Prompt, params: SamplingParams, writer: TextWriter) -> Answer:
    """Generate, writing text as it becomes final; Ctrl-C leaves what was written in `writer`."""
    from lowtide.decode.block_diffusion import Committed

    def write(event: Event) -> None:
        if isinstance(event, Committed):
            writer.commit(event.tokens, event.text)

    answer = ask(llm, prompt, params, write)
    writer.finish(answer.completion.text)
    return answer


def lengthened(llm: LLM, num_prompt: int, params: SamplingParams) -> SamplingParams:
    """`params` of an answer that may be as long as the context leaves, where nothing else is said,
    but for a canvas, which is computed whole."""
    if params.max_tokens is not None or llm.config.is_bidirectional:
        return params
    room = llm.max_new_tokens(num_prompt, params)
    return params if room < 1 else replace(params, max_tokens=room)


def cut_line(answer: Answer) -> str:
    """What is said of answers that did not come to their end; of others nothing."""
    lengths = [len(c.token_ids) for c in answer.completions if c.finish_reason == "length"]
    return f"(cut at {', '.join(map(str, lengths))} tokens)" if lengths else ""


def sampling_line(llm: LLM, params: SamplingParams) -> str:
    """How tokens are drawn where the model's publisher says so and the user does not."""
    published = llm.config.sampling
    in_force = with_published(params, published)
    names = [name for name in published._fields if getattr(params, name) is None]
    told = [f"{name} {value:g}" for name in names if (value := getattr(in_force, name))]
    if not told:
        return ""
    way_out = "" if not in_force.temperature else "; --temperature 0 takes the likeliest token"
    return f"as the model's generation_config.json says: {', '.join(told)}{way_out}"


def text_writer(llm: LLM, prompt: Sequence[int], out: Console, is_whole: bool) -> TextWriter:
    """Writes the answer to a prompt of these ids; thoughts apart, or with `is_whole` and no
    terminal all as it is."""
    from lowtide.serve.parsing import has_thoughts, parser_of

    tokenizer, is_terminal = llm.tokenizer, out.is_terminal
    if tokenizer is None or not has_thoughts(tokenizer) or (is_whole and not is_terminal):
        return TextWriter(out.file, tokenizer is not None, is_terminal)
    return ThinkingWriter(out.file, parser_of(tokenizer, prompt), is_terminal)


def has_view(llm: LLM, console: Console) -> bool:
    """Whether there are blocks to be drawn, and a terminal to show them."""
    return can_redraw(console) and llm.config.is_diffusion


def live_view(llm: LLM, token_ids: Sequence[int], console: Console) -> LiveView:
    """A view of the answer to a prompt of these ids."""
    return LiveView(
        console,
        llm.tokenizer,
        len(token_ids),
        caption=lambda: pass_caption(llm.current_pass),
    )
