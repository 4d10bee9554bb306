"""Configuration files of clients, as printed by `--print-config CLIENT`.

Pure functions of an address, a model name and a context length. They import nothing of the `serve`
extra, so a configuration can be printed without it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

_KEY = "lowtide"
"""Placeholder key for a server without one, since clients require some key."""

_HOURS_MS = 7_200_000
"""An answer may take hours where most experts are on disk."""

_COMPACTED_CONTEXT = 49_152
"""Below this context Claude Code would compact at every turn: it compacts 13,000 tokens below the
space that the answer leaves, which is less than a conversation's start."""

_CODEX_INSTRUCTIONS = (
    "You are a coding agent in a terminal on the user's computer. Work in the current folder: read "
    "files before you change them, make the smallest change that does what was asked, run the "
    "tests, and go on until the task is done. Change files with apply_patch. Say briefly what you "
    "did."
)


class ServedModel(NamedTuple):
    """A server as its clients see it.

    url: without a path. context: tokens. api_key: None if the server needs none.
    """

    url: str
    model: str
    context: int
    api_key: str | None = None

    @property
    def max_answer_tokens(self) -> int:
        """The share of the context that an answer may take; the rest is for the conversation."""
        return max(1, self.context // 4)


def codex_config(served: ServedModel) -> str:
    """Return two files: config.toml and the model catalog that it names."""
    key = 'env_key = "LOWTIDE_API_KEY"\n' if served.api_key else ""
    return f"""\
# ~/.codex/config.toml
model = {_quoted(served.model)}
model_provider = "lowtide"
model_catalog_json = "~/.codex/lowtide-models.json"
web_search = "disabled"

[model_providers.lowtide]
name = "lowtide"
base_url = {_quoted(served.url + "/v1")}
wire_api = "responses"
stream_idle_timeout_ms = {_HOURS_MS}
{key}
# ~/.codex/lowtide-models.json
{json.dumps(codex_catalog(served), indent=2)}
"""


def codex_catalog(served: ServedModel) -> dict[str, object]:
    """Return a model catalog entry, since Codex does not know the model.

    It makes Codex send tools in the two forms that this server reads: one by one, and `apply_patch`
    as a text with a grammar.
    """
    model: dict[str, object] = {
        "slug": served.model,
        "display_name": served.model,
        "description": "Served by lowtide.",
        "base_instructions": _CODEX_INSTRUCTIONS,
        "context_window": served.context,
        "max_context_window": served.context,
        "effective_context_window_percent": 75,
        "truncation_policy": {"mode": "tokens", "limit": max(1000, served.context // 16)},
        "apply_patch_tool_type": "freeform",
        "shell_type": "unified_exec",
        "use_responses_lite": False,
        "supported_reasoning_levels": [],
        "supports_reasoning_summaries": False,
        "default_reasoning_summary": "none",
        "support_verbosity": False,
        "default_verbosity": None,
        "supports_parallel_tool_calls": True,
        "supports_search_tool": False,
        "supports_image_detail_original": False,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "upgrade": None,
    }
    return {"models": [model]}


def claude_config(served: ServedModel) -> str:
    """Return environment variables for Claude Code. Its small helper model is the same model."""
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_MODEL": served.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": served.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": served.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": served.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.max_answer_tokens),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(_HOURS_MS),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_HOURS_MS),
    }
    if served.context < _COMPACTED_CONTEXT:
        variables["DISABLE_AUTO_COMPACT"] = "1"
    return _exports(variables | {"ANTHROPIC_AUTH_TOKEN": served.api_key or _KEY})


def continue_config(served: ServedModel) -> str:
    """Return Continue's config.yaml. Strings are quoted as JSON, which is valid YAML."""
    return f"""\
# ~/.continue/config.yaml
name: lowtide
version: 1.0.0
schema: v1
models:
  - name: {_quoted(served.model)}
    provider: openai
    model: {_quoted(served.model)}
    apiBase: {_quoted(served.url + "/v1")}
    apiKey: {_quoted(served.api_key or _KEY)}
    roles: [chat, edit, apply]
    capabilities: [tool_use]
    defaultCompletionOptions:
      contextLength: {served.context}
      maxTokens: {served.max_answer_tokens}
    requestOptions:
      timeout: {_HOURS_MS}
"""


def open_webui_config(served: ServedModel) -> str:
    """Return environment variables for Open WebUI."""
    variables = {
        "OPENAI_API_BASE_URL": served.url + "/v1",
        "ENABLE_OLLAMA_API": "false",
        "AIOHTTP_CLIENT_TIMEOUT": str(_HOURS_MS // 1000),
    }
    return _exports(variables | {"OPENAI_API_KEY": served.api_key or _KEY})


CLIENTS: Mapping[str, Callable[[ServedModel], str]] = {
    "codex": codex_config,
    "claude": claude_config,
    "continue": continue_config,
    "open-webui": open_webui_config,
}


AGENTS = ("codex", "claude")
"""Clients whose first prompt exceeds a short context."""


def _exports(variables: Mapping[str, str]) -> str:
    """Return `export` lines for a POSIX shell."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _quoted(text: str) -> str:
    """Quote a text in a form that TOML, JSON and YAML all accept."""
    return json.dumps(text)
