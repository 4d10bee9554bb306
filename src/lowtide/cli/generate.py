"""`lowtide generate`: write one answer."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.cli.answer import Answer, ask, ask_showing, cut_line, make_view, sampling_line
from lowtide.cli.command import takes
from lowtide.cli.opening import open_llm
from lowtide.cli.options import Settings
from lowtide.cli.outlook import context_note, outlook, plan_line
from lowtide.cli.passes import steps_table
from lowtide.cli.prompt import Question, read_prompt
from lowtide.cli.report import (
    account_table,
    answer_object,
    json_line,
    plan_table,
    speed_line,
)
from lowtide.cli.screen import stderr_console, stdout_console
from lowtide.cli.text import TextWriter
from lowtide.errors import LowtideError, UsageError
from lowtide.model_folder.demos import can_answer, describe_tasks, tasks_of
from lowtide.option import Group
from lowtide.params import SamplingParams

if TYPE_CHECKING:
    from lowtide.answers.loaded import LoadedModel
    from lowtide.llm import LLM
    from lowtide.plan import MemoryPlan


def model_names(incomplete: str) -> list[str]:
    """Return names of local models that begin so, for shell completion; shells complete paths."""
    try:
        from lowtide.model_folder.hub import list_models

        return [m.name for m in list_models() if m.name.startswith(incomplete)]
    except LowtideError:  # nothing may be printed here
        return []


ModelName = Annotated[
    str,
    typer.Argument(
        help="A folder, GGUF file, hub id such as org/name or org/name:Q4_K_M, or demo:diffusion.",
        metavar="MODEL",
        autocompletion=model_names,
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(help="Prompt, as with -p; quotes are optional.", metavar="TEXT"),
]
PromptText = Annotated[
    str | None,
    typer.Option("-p", "--prompt", help="Prompt to answer; - reads standard input."),
]
PromptIds = Annotated[
    str | None,
    typer.Option(help='Token ids in place of text: "5 17 3".', metavar="IDS", hidden=True),
]
ANSWER_OPTIONS = (
    Group.PROMPT,
    Group.ENGINE,
    Group.HUB,
    Group.SAMPLING,
    Group.DIFFUSION,
    Group.RECORD,
    Group.OUTPUT,
)


@takes(*ANSWER_OPTIONS)
def generate(
    model: ModelName,
    words: Words = None,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    *,
    settings: Settings,
) -> None:
    """Write one answer; notes on the plan and the speed go to standard error."""
    write_answer(model, words, prompt, prompt_ids, settings)


def write_answer(
    model: str,
    words: list[str] | None,
    prompt: str | None,
    prompt_ids: str | None,
    settings: Settings,
) -> None:
    """Answer a prompt given as words, by -p, as token ids or on standard input."""
    params = settings.sampling_params()
    text = " ".join(words) if words else None
    if text is not None and prompt is not None:
        raise UsageError("there are two prompts: give one, after the model or by -p.")
    content = read_prompt(prompt if text is None else text, prompt_ids, model)
    question = Question(
        content, settings.text("system"), settings.flag("raw"), settings.choice("think")
    )
    if settings.flag("json"):
        print(_as_json(model, question, params, settings))
        return
    answer, line = _on_screen(model, question, params, settings)
    if not settings.flag("quiet"):
        stderr_console().print("\n".join(filter(None, [cut_line(answer), line])))


def _as_json(model: str, question: Question, params: SamplingParams, settings: Settings) -> str:
    # Whatever a library prints while at work must not share standard output with the object.
    with redirect_stdout(sys.stderr), open_llm(model, settings, question) as llm:
        prompt = question.token_ids(llm)
        answer = ask(llm, prompt, params, question.is_raw)
        found = answer_object(answer.completions, llm.stats(), llm.plan)
        facts = {"kernels": llm.kernels, "chat_template": question.is_templated(llm.tokenizer)}
        return json_line({**found, **facts})


def _on_screen(
    model: str, question: Question, params: SamplingParams, settings: Settings
) -> tuple[Answer, str]:
    """Show the answer; return it and the line about its speed."""
    console = stdout_console()
    with open_llm(model, settings, question) as llm:
        show_plan(llm, settings)
        tasks = tasks_of(llm.path)
        is_known = isinstance(question.content, str) and can_answer(tasks, question.content)
        if tasks and not is_known and not settings.flag("quiet"):
            stderr_console().print(describe_tasks(tasks))
        prompt = question.token_ids(llm)
        show_sampling(llm, params, settings)
        if not settings.flag("quiet"):
            show_passes(llm, len(prompt), params)
        if params.n > 1:
            answer = ask(llm, prompt, params, question.is_raw)
            _print_all(answer, llm)
        else:
            view = make_view(llm, prompt, console)
            answer = ask_showing(llm, prompt, params, question.is_raw, view)
        if settings.flag("verbose") and llm.plan.num_experts:
            stderr_console().print(account_table(llm.stats()))
        return answer, answer_line(answer, llm, settings.flag("verbose"))


def answer_line(answer: Answer, llm: LLM, is_verbose: bool) -> str:
    """Describe an answer's speed; with `is_verbose` also passes, hit rate and expected speed."""
    if not is_verbose:
        return speed_line(answer)
    prediction = llm.plan.prediction
    expected = None if prediction is None else prediction.speed
    return speed_line(answer, llm.stats(), expected)


def show_plan(llm: LoadedModel, settings: Settings, served: MemoryPlan | None = None) -> None:
    """Print the plan to standard error.

    One line; with `-v` the whole table and the kernels, with `--quiet` nothing.

    served: the plan including what a server holds beside the model.
    """
    console = stderr_console()
    if settings.flag("verbose"):
        console.print(plan_table(served or llm.plan))
        console.print(f"kernels: {llm.kernels}")
        console.print(outlook(llm.plan))
    elif not settings.flag("quiet"):
        console.print(plan_line(llm.plan))
    if not settings.flag("quiet") and (note := context_note(llm.plan, llm.config)):
        console.print(note)


def show_tasks(llm: LoadedModel, settings: Settings) -> None:
    """Print to standard error the tasks of a demo model."""
    if (tasks := tasks_of(llm.path)) and not settings.flag("quiet"):
        stderr_console().print(describe_tasks(tasks))


def show_sampling(llm: LLM, params: SamplingParams, settings: Settings) -> None:
    """Print to standard error the publisher's sampling parameters, if they are in force."""
    if not settings.flag("quiet") and (line := sampling_line(llm, params)):
        stderr_console().print(line)


def show_passes(llm: LLM, num_prompt: int, params: SamplingParams) -> None:
    """Print to standard error how a bidirectional model's passes are divided into chunks.

    Passes are divided where memory does not hold all of their rows at once.
    """
    num_new = min(params.most_tokens, llm.max_new_tokens(num_prompt, params))
    if num_new < 1:
        return  # generation will refuse it
    steps = llm.planned_passes(num_prompt + num_new, replace(params, max_tokens=num_new))
    if any(step.is_divided for step in steps):
        title = f"passes over {steps[0].num_tokens} tokens"
        stderr_console().print(steps_table(steps, title))


def _print_all(answer: Answer, llm: LLM) -> None:
    """Print several answers, each under a numbered line."""
    for number, completion in enumerate(answer.completions, 1):
        writer = TextWriter(sys.stdout, llm.tokenizer is not None, sys.stdout.isatty())
        print(f"--- answer {number} of {len(answer.completions)}")
        writer.commit(completion.token_ids, completion.text, completion.reasoning)
        writer.finish(completion.text)
