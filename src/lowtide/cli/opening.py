"""Open an engine for a model's name, refusing cheap mistakes before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide.cli.options import Settings
from lowtide.cli.screen import ProgressBars, stderr_console
from lowtide.config import ModelConfig
from lowtide.files.whole_file import check_writable
from lowtide.hardware.memory import check_address_space
from lowtide.params import check_kind
from lowtide.plan import FormatPlan, MemoryPlan, check_is_named

if TYPE_CHECKING:
    from lowtide.async_llm import AsyncLLM
    from lowtide.cli.prompt import Question
    from lowtide.engine.planning.passes import PlannedPasses
    from lowtide.llm import LLM
    from lowtide.model_folder.hub_model import HubModel


@contextmanager
def open_llm(model: str, settings: Settings, question: Question | None = None) -> Iterator[LLM]:
    """Load the engine for a model under a progress bar, and close it afterwards.

    Parameters that the model's kind does not have, a `question` that it cannot answer and a budget
    that is too small are refused before anything is fetched or loaded.
    """
    found, config = _find(model, settings)
    params, options = settings.sampling_params(), settings.engine_options()
    trace = settings.text("trace")
    if trace is not None:
        config.check_experts("A trace is of experts")
        from lowtide.replay.trace import is_trace

        check_writable(Path(trace), "trace", is_trace)
    check_kind(params, config.architecture, config.decoding.writes_in_order)
    with ProgressBars() as progress:
        progress("starting", 0, 1)
        from lowtide.llm import LLM, check_request, plan_model

    if not isinstance(found, Path):
        plan_model(found, **options)
    folder = _fetched(found, settings)
    if question is not None:
        check_request(str(folder), question.prompt, params, question.is_raw, **options)
    with ProgressBars() as progress:
        llm = LLM(str(folder), progress=progress, **options)
    with llm, ExitStack() as stack:
        if trace is not None:
            from lowtide.record import recorded

            stack.enter_context(recorded(llm, Path(trace), model))
        yield llm


def open_async(model: str, settings: Settings) -> AsyncLLM:
    """Load an engine for coroutines; the caller closes it.

    Without --context it is the model's own, limited to a share of the budget.
    """
    found, config = _find(model, settings)
    options = _served_options(found, config, settings)
    from lowtide.async_llm import AsyncLLM

    folder = _fetched(found, settings)
    with ProgressBars() as progress:
        return AsyncLLM(str(folder), progress=progress, **options)


def served_context_of(model: str, settings: Settings) -> int:
    """Return the context that `open_async` would choose, without reading or fetching weights."""
    found, config = _find(model, settings)
    return min(int(_served_options(found, config, settings)["context"]), config.max_positions)


def _served_options(
    found: Path | HubModel, config: ModelConfig, settings: Settings
) -> dict[str, Any]:
    """Return a model's options with a context; raises for options that cannot be planned."""
    options = settings.engine_options()
    from lowtide.engine.opening.facts import DEFAULT_CONTEXT
    from lowtide.llm import plan_model
    from lowtide.serve.context import served_context

    def plan_with(context: int) -> MemoryPlan:
        return plan_model(found, **{**options, "context": context})

    context = options.get("context")
    if context is None:
        return {**options, "context": served_context(plan_with, config, DEFAULT_CONTEXT)}
    plan_with(context)
    return options


class Planned(NamedTuple):
    """A model's plan and the facts that `lowtide plan` prints beside it."""

    memory: MemoryPlan
    passes: PlannedPasses | None  # of a bidirectional one
    by_format: tuple[FormatPlan, ...]
    has_chat_template: bool | None  # None: not looked at
    config: ModelConfig


def make_plan(model: str, settings: Settings) -> Planned:
    """Plan a model without reading or fetching weights."""
    found, config = _find(model, settings)
    from lowtide.llm import plan_in_full
    from lowtide.model_folder.model_config import has_chat_template

    plan = plan_in_full(found, **settings.engine_options())
    has_template = has_chat_template(found) if isinstance(found, Path) else None
    return Planned(plan.memory, plan.passes, plan.by_format, has_template, config)


def find_model(model: str, settings: Settings) -> Path:
    """Return a model's folder, fetching it if needed, with a `config.json` that lowtide supports.

    Raises UsageError for a format that is left to be chosen (this is for verbs that compare plans),
    UsageError or HubError if there is no such model, ConfigError for its configuration.
    """
    check_is_named(settings.engine_options().get("format"))
    return _fetched(_find(model, settings)[0], settings)


def find_model_with_experts(model: str, settings: Settings, asked: str) -> Path:
    """Return a folder as `find_model` does; UnsupportedError if the model has no experts.

    asked: subject of the error's sentence.
    """
    found, config = _find(model, settings)
    config.check_experts(asked)
    return _fetched(found, settings)


def quiet_downloads() -> None:
    """Show the hub library's progress bars on terminals only; set before it is imported."""
    if not stderr_console().is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _find(model: str, settings: Settings) -> tuple[Path | HubModel, ModelConfig]:
    """Locate a model and read its configuration; from the hub only `config.json` is fetched."""
    settings.engine_options()  # refused before anything is fetched
    check_address_space()
    quiet_downloads()
    from lowtide.model_folder.hub import locate_model
    from lowtide.model_folder.model_config import load_config

    found, overrides = locate_model(model, offline=settings.flag("offline")), _overrides(settings)
    if isinstance(found, Path):
        return found, load_config(found, overrides)
    return found, found.model_config(overrides)


def _fetched(found: Path | HubModel, settings: Settings) -> Path:
    if isinstance(found, Path):
        return found
    from lowtide.model_folder.hub import fetch_model

    with ProgressBars() as progress:
        return fetch_model(found, overrides=_overrides(settings), progress=progress)


def _overrides(settings: Settings) -> dict[str, object]:
    overrides = settings["config_override"]
    return overrides if isinstance(overrides, dict) else {}
