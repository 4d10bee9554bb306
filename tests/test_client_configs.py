"""Each client reads the output of `--print-config`."""

from __future__ import annotations

import json
import shlex
import tomllib

import pytest
import yaml

from lowtide.serve.client_configs import CLIENTS, ServedModel

URL = "http://127.0.0.1:8000"
NAMES = ["org/tiny", 'a "quoted" name', "$(touch x)"]


def variables(text: str) -> dict[str, str]:
    """As a shell would set them."""
    words = [shlex.split(line) for line in text.splitlines()]
    assert all(len(line) == 2 and line[0] == "export" for line in words)
    return dict(line[1].split("=", 1) for line in words)


@pytest.mark.parametrize("name", NAMES)
def test_codex_gets_its_configuration_and_a_catalog(name: str) -> None:
    text = CLIENTS["codex"](ServedModel(URL, name, 32_768))
    first, _, second = text.partition("\n# ~/.codex/lowtide-models.json\n")
    config = tomllib.loads(first)
    assert config["model"] == name
    assert config["model_catalog_json"] == "~/.codex/lowtide-models.json"
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == f"{URL}/v1" and provider["wire_api"] == "responses"
    assert "env_key" not in provider
    [model] = json.loads(second)["models"]
    assert model["slug"] == name and model["context_window"] == 32_768
    assert model["apply_patch_tool_type"] == "freeform"
    assert model["use_responses_lite"] is False


@pytest.mark.parametrize("name", NAMES)
def test_claude_code_gets_its_variables(name: str) -> None:
    found = variables(CLIENTS["claude"](ServedModel(URL, name, 32_768, "secret")))
    assert found["ANTHROPIC_BASE_URL"] == URL
    assert found["ANTHROPIC_AUTH_TOKEN"] == "secret"
    assert found["ANTHROPIC_MODEL"] == found["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == name
    assert found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert found["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"
    assert found["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert found["DISABLE_AUTO_COMPACT"] == "1"  # its first request would be compacted
    assert "DISABLE_AUTO_COMPACT" not in CLIENTS["claude"](ServedModel(URL, name, 49_152))


@pytest.mark.parametrize("name", NAMES)
def test_continue_gets_its_yaml(name: str) -> None:
    config = yaml.safe_load(CLIENTS["continue"](ServedModel(URL, name, 8192)))
    assert config["schema"] == "v1"
    [model] = config["models"]
    assert model["model"] == name and model["apiBase"] == f"{URL}/v1"
    assert model["defaultCompletionOptions"] == {"contextLength": 8192, "maxTokens": 2048}


def test_open_webui_gets_its_variables() -> None:
    found = variables(CLIENTS["open-webui"](ServedModel(URL, "org/tiny", 8192)))
    assert found["OPENAI_API_BASE_URL"] == f"{URL}/v1"
    assert found["ENABLE_OLLAMA_API"] == "false"


def test_every_client_needs_a_key_where_the_server_has_one() -> None:
    for client in CLIENTS:
        with_key = CLIENTS[client](ServedModel(URL, "org/tiny", 8192, "secret"))
        assert "secret" in with_key or "LOWTIDE_API_KEY" in with_key
        assert "secret" not in CLIENTS[client](ServedModel(URL, "org/tiny", 8192))
