"""Conversations with tools, thoughts and late system turns, and the process that renders them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from programs import python
from small_tokenizers import make_tokenizer

from lowtide import child_process
from lowtide.errors import UnsupportedError, UsageError
from lowtide.model_folder import chat_template

HELLO = {"role": "user", "content": "hello"}
CALL = {"type": "function", "id": "call_1", "function": {"name": "f", "arguments": {"a": [1]}}}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "call_1"}
JSON = "{{ messages | tojson }}"
PUBLISHED = (
    "{% if tools %}{{ tools | tojson(ensure_ascii=False) }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}"
)


def render(template: str, *messages: object, **options: object) -> str:
    return make_tokenizer(template=template).render_chat(messages, options=options)  # type: ignore[arg-type]


def rendered(*messages: object) -> list[dict[str, Any]]:
    return json.loads(render(JSON, *messages))  # type: ignore[no-any-return]


# messages


def test_calls_and_their_results() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
    result = {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "call_1"}
    assert rendered(HELLO, called, result) == [
        HELLO,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    ]
    called_text = '[user]hello[assistant]<f {"a": [1]}>'
    assert render(PUBLISHED, HELLO, called, result) == called_text + "[tool]2"


def test_arguments_may_be_text() -> None:
    for arguments in ('{"a": [1]}', {"a": [1]}):
        call = CALL | {"function": {"name": "f", "arguments": arguments}}
        message, _ = rendered({"role": "assistant", "content": "", "tool_calls": [call]}, RESULT)
        assert message["tool_calls"] == [CALL]
    call = {"function": {"name": "f", "arguments": ""}}
    message, _ = rendered({"role": "assistant", "tool_calls": [call]}, RESULT)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_thoughts_by_every_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        message, _ = rendered({"role": "assistant", "content": "a", name: "hm"}, HELLO)
        assert message == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "hm"}
NAMES = ("{{ messages[0].thinking }}", "{{ messages[0]['thinking'] }}")
ONE_OF_BOTH = (
    "{% set m = messages[0] %}{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('not both') }}{% endif %}({{ m.thinking }})({{ m.content }})"
)


@pytest.mark.parametrize("template", NAMES)
def test_thoughts_by_gpt_oss_s_name(template: str) -> None:
    calls = {"tool_calls": [CALL]}
    for more in ({}, {"content": "a"}, calls, {"content": "a"} | calls):
        assert render(template, THOUGHT | more, RESULT) == "hm"


def test_thoughts_and_words_in_one_where_a_template_takes_one_of_both() -> None:
    calls = {"content": "a", "tool_calls": [CALL]}
    assert render(ONE_OF_BOTH, THOUGHT | {"content": "a"}, HELLO) == "(hm)(a)"
    assert render(ONE_OF_BOTH, THOUGHT | calls, RESULT) == "(hm\n\na)()"
    with pytest.raises(UsageError, match="another reason"):
        render("{{ raise_exception('another reason') }}{{ m.thinking }}", THOUGHT | calls, RESULT)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "only an assistant's"),
        ({"role": "assistant", "content": "a", "tool_calls": CALL}, "a list tool_calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, "tool call 0, must be"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}, "string name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]},
            "a JSON object or its text",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]},
            "a string id",
        ),
        ({"role": "assistant", "content": "a", "reasoning": 1}, "string reasoning"),
        ({"role": "user", "content": "a", "reasoning": "b"}, "not known: reasoning"),
        ({"role": "tool", "content": "a", "tool_call_id": 3}, "string tool_call_id"),
        ({"role": "developer", "content": "a"}, "known roles"),
    ],
)
def test_what_no_template_could_read_is_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        render(JSON, message)


def test_tools_are_a_variable_of_templates_that_have_it() -> None:
    tools = [{"type": "function", "function": {"name": "é", "parameters": {}}}]
    assert render(PUBLISHED, HELLO, tools=tools).startswith('[{"type": "function", "function": {"n')
    assert "é" in render(PUBLISHED, HELLO, tools=tools)
    assert render("{{ messages[0].content }}", HELLO, tools=[]) == "hello"
    with pytest.raises(UnsupportedError, match="has no tools"):
        render("{{ messages[0].content }}", HELLO, tools=tools)


def test_content_is_never_a_template() -> None:
    said = "{{ 7 * 7 }}{% for x in messages %}"
    assert render("{{ messages[0].content }}", HELLO | {"content": said}) == said


def test_nesting_is_bounded() -> None:
    tool: dict[str, Any] = {}
    for _ in range(100_000):
        tool = {"a": tool}
    with pytest.raises(UsageError, match="nested too deeply"):
        render(PUBLISHED, HELLO, tools=[tool])


# later system turns

LATE = {"role": "system", "content": "be brief"}
TURNS = (HELLO, LATE, {"role": "assistant", "content": "hi"}, LATE)
REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
LEAVING_OUT = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endif %}{% endfor %}"
)
ALTERNATING = REFUSING + (
    "{% for m in messages %}{% if loop.previtem is defined and m.role == loop.previtem.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


def test_a_template_that_has_late_system_turns_keeps_them() -> None:
    expected = "[user]hello[system]be brief[assistant]hi[system]be brief"
    assert render(PUBLISHED, *TURNS) == expected


@pytest.mark.parametrize("template", [REFUSING, LEAVING_OUT, ALTERNATING])
def test_a_late_system_turn_is_the_user_s_where_the_template_has_none(template: str) -> None:
    expected = "[user]hello\n\nbe brief[assistant]hi[user]be brief"
    assert render(template, *TURNS) == expected
    first = {"role": "system", "content": "S"}
    assert render(template, first, *TURNS) == "[system]S" + expected


def test_a_template_that_fails_otherwise_still_fails() -> None:
    with pytest.raises(UsageError, match="no users"):
        render("{{ raise_exception('no users') }}", HELLO, LATE)


@pytest.mark.parametrize("template", [LEAVING_OUT, REFUSING])
def test_a_late_system_turn_counts_by_its_place_and_not_by_its_words(template: str) -> None:
    said = HELLO | {"content": "it said: be brief"}
    expected = "[user]it said: be brief\n\nbe brief[assistant]hi[user]more"
    turns = (said, LATE, {"role": "assistant", "content": "hi"}, HELLO | {"content": "more"})
    assert render(template, *turns) == expected


# templates that have fewer roles, or take them in turn only

SYSTEM = {"role": "system", "content": "be kind"}
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    "",
)
EACH = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}"
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
ANSWER = {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize("template", [f"{begin}{EACH}{{% endfor %}}" for begin in NO_SYSTEM])
def test_a_first_system_turn_is_the_user_s_where_the_template_has_none(template: str) -> None:
    assert render(template, SYSTEM, HELLO) == "[user]be kind\nhello"
    assert render(template, SYSTEM, ANSWER, HELLO) == "[user]be kind[assistant]hi[user]hello"
    assert render(template, SYSTEM) == "[user]be kind"
    said = HELLO | {"content": "who said be kind?"}
    assert render(template, SYSTEM, said) == "[user]be kind\nwho said be kind?"


def test_a_template_with_the_role_may_leave_it_out_at_times() -> None:
    """As Mistral's does, which has it in the last message, if that is the user's."""
    template = (
        "{% set system = messages[0] if messages[0].role == 'system' %}"
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
        "{% if loop.last and m.role == 'user' and system %}{{ system.content }}, {% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert render(template, SYSTEM, HELLO) == "[user]be kind, hello"
    assert render(template, SYSTEM, HELLO, called, RESULT) == "[user]hello[assistant][tool]2"
    assert render(template, HELLO, SYSTEM, HELLO) == "[user]hello\n\nbe kind\n\nhello"


def test_turns_are_joined_where_the_template_wants_them_in_turn() -> None:
    more, thought = HELLO | {"content": "you"}, ANSWER | {"reasoning_content": "hm"}
    assert render(STRICT, HELLO, more) == "[user]hello\nyou"
    assert render(STRICT, SYSTEM, HELLO, more) == "[user]be kind\nhello\nyou"
    texts = render(STRICT, HELLO, ANSWER, thought, more, HELLO)
    assert texts == "[user]hello[assistant]hi\nhi[user]you\nhello"
    assert render(PUBLISHED, SYSTEM, HELLO, more) == "[system]be kind[user]hello[user]you"


def test_a_conversation_that_begins_with_an_answer() -> None:
    """A user who says nothing precedes it where the template wants turns in turn."""
    assert render(STRICT, ANSWER, HELLO) == "[user][assistant]hi[user]hello"
    assert render(STRICT, ANSWER, ANSWER, HELLO) == "[user][assistant]hi\nhi[user]hello"
    assert render(STRICT, SYSTEM, ANSWER, HELLO) == "[user]be kind[assistant]hi[user]hello"
    assert render(STRICT, ANSWER) == "[user][assistant]hi"
    assert render(PUBLISHED, ANSWER, HELLO) == "[assistant]hi[user]hello"
    with_system = (
        "{% set ns = namespace(user=true) %}{% for m in messages %}{% if m.role != 'system' %}"
        "{% if (m.role == 'user') != ns.user %}{{ raise_exception('in turn') }}{% endif %}"
        "{% set ns.user = not ns.user %}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = render(with_system, SYSTEM, ANSWER, HELLO)
    assert text == "[system]be kind[user][assistant]hi[user]hello"


def test_a_template_may_keep_lists() -> None:
    """As Kimi's do, of the ids of calls."""
    template = (
        "{% set ids = [] %}{% for m in messages %}{% set _ = ids.append(m.content) %}{% endfor %}"
        "{% set _ = ids.insert(0, 'a') %}{% set _ = ids.extend(['b']) %}{{ ids.pop(0) }}{{ ids }}"
    )
    assert render(template, HELLO, HELLO) == "a['hello', 'hello', 'b']"
    with pytest.raises(UsageError, match="unsafe"):
        render("{% set _ = messages[0].update({'content': 'x'}) %}", HELLO)


ROLES = st.sampled_from(["system", "user", "assistant"])


@examples(40)
@given(st.lists(ROLES, min_size=1, max_size=6), st.sampled_from([STRICT, REFUSING, LEAVING_OUT]))
def test_nothing_that_system_or_users_say_is_lost(roles: list[str], template: str) -> None:
    """Of conversations that end with one of them."""
    roles = [*roles, "user"]
    messages = [{"role": role, "content": f"<{i}>"} for i, role in enumerate(roles)]
    text = render(template, *messages)
    places = [text.find(message["content"]) for message in messages]
    assert places == sorted(places) and min(places) >= 0


# answers that are begun

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMING = CHATML.replace("m.content", "m.content | trim")


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
def test_an_answer_that_is_begun_is_the_prompt_s_end(template: str) -> None:
    begun = ANSWER | {"content": "I say "}
    expected = "<user>hello</><assistant>I say"
    assert render(template, HELLO, begun) == expected + " " * (template == CHATML)
    assert render(template, HELLO, ANSWER, HELLO) == (
        "<user>hello</><assistant>hi</><user>hello</><assistant>"
    )
    for empty in (ANSWER | {"content": ""}, begun | {"content": []}):
        assert render(template, HELLO, empty) == "<user>hello</><assistant>"


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, "calls tools: add a message"),
        (ANSWER | {"tool_calls": [CALL]}, "Message 1, the last one, calls tools"),
        (THOUGHT, "thoughts alone"),
    ],
)
def test_what_cannot_be_continued_is_refused(last: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        render(CHATML, HELLO, last)


def test_a_template_that_leaves_the_last_answer_out() -> None:
    with pytest.raises(UsageError, match="leaves it out. End the conversation with a user's"):
        render("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", *BEGUN)
    with pytest.raises(UsageError, match="at least one message"):
        render(CHATML, ANSWER | {"content": ""})


BEGUN = (HELLO, ANSWER)


# arguments


@pytest.mark.parametrize(
    "written",
    [
        "c.arguments | tojson",
        "c.arguments",
        "'' + c.arguments",
        "c.arguments + ''",
        "'' ~ c.arguments",
    ],
)
def test_arguments_as_json_however_a_template_writes_them(written: str) -> None:
    template = (
        "{% for m in messages %}{% for call in m.tool_calls %}{% set c = call.function %}"
        "{{ " + written + " }}{% if c.arguments is mapping %}{% for k, v in c.arguments.items() %}"
        "[{{ k }}={{ v }}]{% endfor %}{% endif %}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"a": "é", "b": null}'}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert render(template, HELLO, message, RESULT) == '{"a": "é", "b": null}[a=é][b=None]'


# the process


def renderers() -> list[psutil.Process]:
    """The processes that render templates for this one."""
    children = psutil.Process().children()
    return [each for each in children if "template_worker" in " ".join(each.cmdline())]


def test_one_process_renders_them_all_and_another_after_a_limit() -> None:
    assert render("{{ 1 + 1 }}", HELLO) == "2"
    [child] = renderers()
    with pytest.raises(UsageError, match="no"):
        render("{{ raise_exception('no') }}", HELLO)
    assert render(JSON, HELLO) and renderers() == [child]
    with pytest.raises(UsageError, match="memory"):
        render("{{ 'a' * 10**10 }}", HELLO)
    assert not renderers()
    assert render(JSON, HELLO) and renderers() != [child]


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler() }}",
        "{% break %}",
        "{% for a in messages %}" * 25 + "x" + "{% endfor %}" * 25,
        "{% if true %}" * 200 + "x" + "{% endif %}" * 200,
        "{{ 10**5000 }}",
        "{{ '' | nope }}",
        "{% set _ = messages.clear() %}",
    ],
)
def test_whatever_a_template_raises_is_told_in_one_sentence(template: str) -> None:
    assert render("{{ 1 + 1 }}", HELLO) == "2"
    [child] = renderers()
    with pytest.raises(UsageError, match=r"chat template failed: [^\n]*[^.\n]\.\Z") as error:
        render(template, HELLO)
    assert "Traceback" not in str(error.value)
    assert renderers() == [child]


def test_a_process_that_was_killed_is_another_one_next_time() -> None:
    render(JSON, HELLO)
    [child] = renderers()
    child.kill()
    child.wait()
    assert render(JSON, HELLO) == json.dumps([HELLO])


def test_an_interrupt_leaves_no_half_read_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(child_process, "os", SimpleNamespace(**{**vars(os), "read": interrupted}))
        with pytest.raises(KeyboardInterrupt):
            render("{{ 'other' }}", HELLO)
    assert render("{{ 'mine' }}", HELLO) == "mine"


def test_each_render_has_its_own_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_CPU_S", 1)
    busy = "{% for i in range(300) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{{ x }}"
    texts = [render(busy, HELLO, x=i) for i in range(8)]
    assert texts == [str(i) for i in range(8)]


def test_threads_get_their_own_answers() -> None:
    wrong: list[str] = []

    def ask(name: int) -> None:
        for i in range(20):
            text = render("{{ messages[0].content * 50 }}", HELLO | {"content": f"{name}.{i};"})
            if text != f"{name}.{i};" * 50:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@examples(20)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_what_is_said_comes_through_unchanged(texts: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    assert rendered(*messages) == messages


FORKED = """
import os, sys
import psutil
from lowtide.model_folder.template_process import TEMPLATES

def ask(value):
    request = {"template": "{{ v }}", "variables": {"v": value}, "max_output_chars": 100,
               "max_memory_bytes": 512 << 20, "max_cpu_s": 2}
    return TEMPLATES.ask(request, 60.0)["text"], psutil.Process().children()[0].pid

text, own = ask("parent")
assert text == "parent"
if not os.fork():
    text, other = ask("child")
    sys.exit(0 if text == "child" and other != own else 3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert ask("again") == ("again", own)
print(own)
"""


def is_running(pid: int) -> bool:
    """Not where it has ended and nothing has waited for it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_fork_has_its_own_and_none_outlives_the_program() -> None:
    done = python("-c", FORKED)
    assert done.returncode == 0, done.stderr
    assert not is_running(int(done.stdout))


def test_it_ends_with_a_program_that_is_killed() -> None:
    code = FORKED.split("if not os.fork")[0] + "print(own, flush=True)\nimport time\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        own = int(program.stdout.readline())
        program.kill()
    for _ in range(600):
        if not is_running(own):
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"process {own} is still there")
