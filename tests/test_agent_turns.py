"""Coding agents' turns over the real engine.

Answers in the model's own form, forced token by token, come as each agent's calls, and a turn
begins with the keys of the one before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from agent_requests import claude_request, codex_request, words
from forced_serving import ForcedService, agent_model
from scripted_serving import events_of
from serving import LIMIT_S, serving_app
from small_tokenizers import QWEN

from lowtide import AsyncLLM
from lowtide.serve.app import build_app
from lowtide.serve.context import AGENT_TOKENS

PATCH = '*** Begin Patch\n*** Update File: a.py\n@@\n-x = "\\n"\n+\ty = 1\n*** End Patch\n'
FORGETFUL = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
<|im_start|>assistant
<think>
"""
"""Prompts end in a thought, and no later one has it."""

LOOK = "<think>\nLook first.\n</think>\n\nI look.\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = agent_model(tmp_path_factory.mktemp("agents") / "tiny", AGENT_TOKENS)
    made = AsyncLLM(folder, context=AGENT_TOKENS, host_memory="256MiB")
    yield made
    asyncio.run(made.close())


def check_turns(service: ForcedService, num_turns: int) -> None:
    """All came to their end, within their grammars, and computed no turn before them again."""
    turns = [answered.done for answered in service.answered]
    assert len(turns) == num_turns and not service.num_refused
    for before, after in pairwise(turns):
        assert after.num_resumed >= before.num_prompt + before.num_new - 1


def test_codex_gets_its_calls_and_its_conversation_is_kept(llm: AsyncLLM) -> None:
    script = [
        LOOK + QWEN.text(("exec_command", {"cmd": "ls"})),
        QWEN.text(("apply_patch", {"input": PATCH})),
        "Done.",
    ]
    service, items, outputs = ForcedService(llm, script), [], []
    with serving_app(build_app(service)) as url:
        for _ in script:
            body = codex_request(items)
            answer = httpx.post(f"{url}/v1/responses", json=body, timeout=LIMIT_S)
            response = events_of(answer.text)[-1]["response"]
            assert response["status"] == "completed"
            outputs.append(response["output"])
            for item in response["output"]:
                items.append(item)
                if "call_id" in item:
                    made = {"type": f"{item['type']}_output", "call_id": item["call_id"]}
                    items.append({**made, "output": "1 failed"})
    (thoughts, text, call), [patch], [end] = outputs
    assert thoughts["content"][0]["text"] == "Look first."
    assert text["content"][0]["text"] == "I look."
    assert (call["name"], json.loads(call["arguments"])) == ("exec_command", {"cmd": "ls"})
    assert (patch["type"], patch["input"]) == ("custom_tool_call", PATCH)
    assert end["content"][0]["text"] == "Done."
    check_turns(service, 3)


def test_a_patch_of_another_form_is_not_what_codex_lets_its_model_write(llm: AsyncLLM) -> None:
    service = ForcedService(llm, [QWEN.text(("apply_patch", {"input": "*** End Patch\n"}))])
    with serving_app(build_app(service)) as url:
        httpx.post(f"{url}/v1/responses", json=codex_request(stream=False), timeout=LIMIT_S)
    assert service.num_refused == 1


def test_claude_code_gets_its_calls_and_its_conversation_is_kept(llm: AsyncLLM) -> None:
    script = [LOOK + QWEN.text(("Tool1", {"path": "a.py"})), "Done."]  # as the second turn has it
    service = ForcedService(llm, script)
    with serving_app(build_app(service)) as url:
        first, second = (
            httpx.post(
                f"{url}/v1/messages", json=claude_request(turn, stream=False), timeout=LIMIT_S
            ).json()
            for turn in (1, 2)
        )
    thoughts, text, call = first["content"]
    assert (thoughts["thinking"], text["text"]) == ("Look first.", "I look.")
    assert (call["name"], call["input"]) == ("Tool1", {"path": "a.py"})
    assert (first["stop_reason"], second["stop_reason"]) == ("tool_use", "end_turn")
    assert [block["text"] for block in second["content"]] == ["Done."]
    usage = second["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"]
    check_turns(service, 2)


@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2_moe", "qwen3_5_moe"])
def test_a_turn_whose_thoughts_are_dropped_computes_its_answer_and_what_is_new(
    family: str, tmp_path: Path
) -> None:
    """Behind some 16,000 tokens, whether keys can be cut anywhere or states were copied."""
    folder = agent_model(tmp_path / "tiny", AGENT_TOKENS, family, FORGETFUL)
    llm = AsyncLLM(folder, context=AGENT_TOKENS, host_memory="256MiB")
    shown, asked = "I see.", "And then?"
    service = ForcedService(llm, [], f"{words(300)}\n</think>\n\n{shown}")
    messages = [{"role": "user", "content": words(98_000)}]
    try:
        with serving_app(build_app(service)) as url:
            for _ in range(3):
                body = {"messages": messages}
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S)
                [choice] = answer.json()["choices"]
                assert choice["message"]["content"].strip() == shown
                messages += [{"role": "assistant", "content": shown}]
                messages += [{"role": "user", "content": asked}]
        assert llm.tokenizer is not None
        turn = f"{shown}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n"
        new = f"{turn}<|im_start|>assistant\n<think>\n"
        num_new = len(llm.tokenizer.encode(new))
        first, *later = [answered.done for answered in service.answered]
        assert first.num_prompt > 16_000 and not first.num_resumed
        for done in later:
            assert done.num_prompt - done.num_resumed <= num_new < 60
    finally:
        asyncio.run(llm.close())
