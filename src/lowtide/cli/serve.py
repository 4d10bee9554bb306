"""`lowtide serve`: serve a model to OpenAI's, Anthropic's and Ollama's clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.cli.command import takes
from lowtide.cli.generate import ModelName, show_plan, show_tasks
from lowtide.cli.opening import open_async, served_context_of
from lowtide.cli.options import Settings
from lowtide.cli.outlook import conversation_note
from lowtide.cli.screen import printable, stderr_console
from lowtide.errors import UsageError
from lowtide.option import Group
from lowtide.serve.client_configs import AGENTS, CLIENTS, ServedModel
from lowtide.serve.context import agent_note
from lowtide.serve.settings import ServeSettings

if TYPE_CHECKING:
    from lowtide.async_llm import AsyncLLM

SERVE_PACKAGES = (
    *("fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance", "markdown_it"),
)


@takes(Group.SERVE, Group.ENGINE, Group.HUB, Group.OUTPUT, unlisted=("json",))
def serve(
    model: ModelName,
    print_config: Annotated[
        str | None,
        typer.Option(
            help=f"Print a client's configuration and exit: {', '.join(CLIENTS)}.",
            metavar="CLIENT",
        ),
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Answer OpenAI, Anthropic and Ollama clients over HTTP, until Ctrl-C or SIGTERM."""
    if print_config is not None and print_config not in CLIENTS:
        raise UsageError(f"--print-config knows {', '.join(CLIENTS)}, not {print_config!r}.")
    if settings.flag("json"):
        raise UsageError("serve prints no JSON; /v1/lowtide/plan and /v1/lowtide/stats are.")
    check_extra("serve")
    asked = settings.serve_settings()
    if print_config is not None:
        served = _served_model(model, settings)
        print(CLIENTS[print_config](served), end="")
        if print_config in AGENTS and (note := agent_note(served.context)):
            stderr_console().print(note)
        return
    from lowtide.serve.server import bound_socket, run_server
    from lowtide.serve.service import name_of, served_plan

    with bound_socket(asked) as bound:
        llm = open_async(model, settings)
        show_plan(llm, settings, served_plan(llm))
        show_tasks(llm, settings)
        asked = replace(asked, served_name=asked.served_name or name_of(model))

        async def run() -> None:
            async with llm:
                await run_server(llm, asked, bound, lambda url: _report(llm, asked, url))

        asyncio.run(run())


def _report(llm: AsyncLLM, asked: ServeSettings, url: str) -> None:
    """Print to standard error the server's address and the clients that it cannot serve."""
    console = stderr_console()
    console.print(f"{printable(asked.served_name or '')} is served at {url} (Ctrl-C ends it)")
    context = min(llm.plan.context, llm.config.max_positions)
    for note in (conversation_note(llm.plan), agent_note(context)):
        if note:
            console.print(note)


def _served_model(model: str, settings: Settings) -> ServedModel:
    """Return the facts that a client's configuration needs, without loading the model."""
    from lowtide.serve.service import name_of

    asked, context = settings.serve_settings(), served_context_of(model, settings)
    host = asked.host if asked.is_local else "127.0.0.1"
    url = f"http://[{host}]:{asked.port}" if ":" in host else f"http://{host}:{asked.port}"
    return ServedModel(url, asked.served_name or name_of(model), context, asked.api_key)


def check_extra(verb: str, packages: Sequence[str] = SERVE_PACKAGES, extra: str = "serve") -> None:
    """Raise UsageError if packages of an extra are missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{verb} needs {', '.join(missing)}: install them with pip install 'lowtide[{extra}]'."
        )
