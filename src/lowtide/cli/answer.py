"""Generate one answer, show it while it is made, and time it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from lowtide.cli.live import LiveView
from lowtide.cli.passes import pass_caption
from lowtide.cli.screen import can_redraw
from lowtide.cli.text import TextWriter
from lowtide.params import SamplingParams, with_published

if TYPE_CHECKING:
    from lowtide.answers.completion import Completion, Usage
    from lowtide.decode.request import Event
    from lowtide.llm import LLM

Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, chat messages


class Answer(NamedTuple):
    """The completions of one prompt, and when they came."""

    completions: list[Completion]
    generation_s: float  # from the request to the last token
    first_s: float  # from the request to the first token
    num_first: int  # tokens that the completions began with: of a diffusion model, whole blocks

    @property
    def completion(self) -> Completion:
        return self.completions[0]

    @property
    def tokens_per_s(self) -> float:
        """The rate of tokens after the first, which a plan predicts; of all if none came later."""
        num_tokens = self.usage.completion_tokens
        if num_tokens > self.num_first and self.generation_s > self.first_s:
            return (num_tokens - self.num_first) / (self.generation_s - self.first_s)
        return num_tokens / self.generation_s if self.generation_s > 0 else 0.0

    @property
    def usage(self) -> Usage:
        """Sum the usage of all completions; only a single completion keeps its receipt."""
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
    is_raw: bool,
    on_event: Callable[[Event], None] | None = None,
) -> Answer:
    """Generate without showing anything; `is_raw` leaves thoughts within the text."""
    from lowtide.decode.request import Committed

    start_s = time.perf_counter()
    first: dict[int, tuple[float, int]] = {}  # by request: seconds until its first tokens, how many

    def note(event: Event) -> None:
        if isinstance(event, Committed) and event.tokens and event.request not in first:
            first[event.request] = time.perf_counter() - start_s, len(event.tokens)
        if on_event is not None:
            on_event(event)

    completions = llm.generate([prompt], params, note, raw=is_raw)
    generation_s = time.perf_counter() - start_s
    first_s = min((seconds for seconds, _ in first.values()), default=generation_s)
    return Answer(completions, generation_s, first_s, sum(number for _, number in first.values()))


def ask_showing(
    llm: LLM, prompt: Prompt, params: SamplingParams, is_raw: bool, view: LiveView | TextWriter
) -> Answer:
    """Generate and show text as it becomes final; a `LiveView` also draws unfinished blocks.

    After Ctrl-C the text so far is in `view`.
    """
    from lowtide.decode.request import Committed, Draft

    def show(event: Event) -> None:
        if isinstance(event, Committed):
            view.commit(event.tokens, event.text, event.reasoning)
        elif isinstance(event, Draft) and isinstance(view, LiveView):
            shown = slice(event.num_shown)
            view.draft(event.block_start, event.tokens[shown], event.is_masked[shown])

    drawing: AbstractContextManager[object] = view if isinstance(view, LiveView) else nullcontext()
    with drawing:
        answer = ask(llm, prompt, params, is_raw, show)
        view.finish(answer.completion.text)
    return answer


def cut_line(answer: Answer) -> str:
    """Return a note about completions that were cut at a length limit, or an empty string."""
    lengths = [len(c.token_ids) for c in answer.completions if c.finish_reason == "length"]
    return f"(cut at {', '.join(map(str, lengths))} tokens)" if lengths else ""


def sampling_line(llm: LLM, params: SamplingParams) -> str:
    """Describe the publisher's sampling parameters that apply because the user set none."""
    published = llm.config.sampling
    in_force = with_published(params, published)
    names = [name for name in published._fields if getattr(params, name) is None]
    told = [f"{name} {value:g}" for name in names if (value := getattr(in_force, name))]
    if not told:
        return ""
    way_out = "" if not in_force.temperature else "; --temperature 0 takes the likeliest token"
    return f"as the model's generation_config.json says: {', '.join(told)}{way_out}"


def make_view(llm: LLM, token_ids: Sequence[int], console: Console) -> LiveView | TextWriter:
    """Return a view for the answer to this prompt.

    Blocks of a diffusion model are drawn on a terminal that can redraw; otherwise text is written.
    """
    if can_redraw(console) and llm.config.decoding.redraws:
        num_prompt, caption = len(token_ids), lambda: pass_caption(llm.current_pass)
        return LiveView(console, llm.tokenizer, num_prompt, caption=caption)
    return TextWriter(console.file, llm.tokenizer is not None, console.is_terminal)
