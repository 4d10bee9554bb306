"""Tasks of the demo models: answers are right, and held-out tasks are never trained on."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples import examples, scaled
from hypothesis import given
from hypothesis import strategies as st
from serving import serving
from typer.testing import CliRunner

from lowtide import LLM, AsyncLLM
from lowtide.cli.app import app
from lowtide.model_folder import demos
from lowtide.model_folder.demo_tasks import NUM_TEXT_TURNS, TASKS, draw, held_out, held_out_text
from lowtide.model_folder.demos import DEMO_FOLDER, DEMO_NAMES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PUZZLE = r"Solve sudoku:(?:\\n[1-6.]{3} [1-6.]{3}){6}"
VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}
DIGITS = list("123456")


def units(grid: str) -> Iterator[list[str]]:
    """Rows, columns and boxes of a grid as the tasks write one."""
    rows = grid.replace(" ", "").splitlines()
    yield from map(list, rows)
    yield from map(list, zip(*rows, strict=True))
    for row in (0, 2, 4):
        for column in (0, 3):
            yield [*rows[row][column : column + 3], *rows[row + 1][column : column + 3]]


def is_right(task: str, question: str, answer: str) -> bool:
    numbers = [int(found) for found in re.findall(r"\d+", question)]
    if task == "sum":
        return int(answer) == sum(numbers)
    if task == "sort":
        return answer == " ".join(map(str, sorted(numbers)))
    if task == "roman":
        values = [VALUES[letter] for letter in answer]
        signs = [-1 if a < b else 1 for a, b in zip(values, [*values[1:], 0], strict=True)]
        return numbers == [sum(s * v for s, v in zip(signs, values, strict=True))]
    if task == "json end":
        return bool(json.loads(question + answer))
    if task == "json value":
        key, _, text = question.partition(" of ")
        return str(json.loads(text)[key]) == answer
    agrees = all(asked in (".", found) for asked, found in zip(question, answer, strict=True))
    return agrees and all(sorted(unit) == DIGITS for unit in units(answer))


@examples(100)
@given(st.sampled_from(list(TASKS)), st.integers())
def test_answers_are_right(task: str, seed: int) -> None:
    make, phrases = TASKS[task]
    question, answer = make(random.Random(seed))
    assert is_right(task, question, answer)
    assert is_right(task, *make(random.Random(seed)))  # and the same from the same seed
    for wanted in (True, False):
        source = random.Random(seed)
        found = draw(task, source, wanted)
        assert found == draw(task, random.Random(seed), wanted)
        ends = (phrase.split("{}") for phrase in phrases)
        [*asked] = (
            found.prompt[len(first) : len(found.prompt) - len(last)]
            for first, last in ends
            if found.prompt.startswith(first) and found.prompt.endswith(last)
        )
        assert wanted in [held_out(task, each) for each in asked]


def test_one_question_of_ten_is_held_out() -> None:
    questions = [f"{a} + {b}" for a in range(100) for b in range(100)]
    assert 900 < sum(held_out("sum", question) for question in questions) < 1100
    text = held_out_text()
    assert text == held_out_text() and text.count("<|assistant|>") == NUM_TEXT_TURNS


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_a_demo_answers_what_readme_says(name: str) -> None:
    """A few questions of every task in README's table; `make demo-accuracy` asks more."""
    metrics = json.loads((DEMO_FOLDER / name / "metrics.json").read_text())
    [head] = re.findall(r"^\| demo \|.*$", README, flags=re.M)
    [row] = re.findall(rf"^\| \[demo:{name}\].*metrics.json.*$", README, flags=re.M)
    names = [cell.strip() for cell in head.strip("|").split("|")][1:]
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    shown = {task: cell for task, cell in zip(names, cells, strict=True) if cell != "-"}
    assert shown == {task: f"{share:.1%}" for task, share in metrics.items() if share >= 0.95}
    assert len(shown) >= 5
    tasks = [task for task in shown if task in TASKS]
    asked = [draw(task, random.Random(seed), True) for task in tasks for seed in range(8)]
    with LLM(f"demo:{name}", context=512) as llm:
        answers = [one.text for one in llm.generate([one.prompt for one in asked])]
    right = [answer == one.answer for answer, one in zip(answers, asked, strict=True)]
    assert sum(right) >= 0.9 * len(right)


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_a_demo_knows_its_tasks_and_nothing_else(name: str) -> None:
    """Whatever training draws, in all of its words, and none of what people ask."""
    metrics = json.loads((DEMO_FOLDER / name / "metrics.json").read_text())
    tasks = demos.tasks_of(DEMO_FOLDER / name)
    source = random.Random(0)
    for task in TASKS:
        for _ in range(scaled(60)):
            prompt = draw(task, source, source.random() < 0.5).prompt
            assert demos.can_answer(tasks, prompt) == (metrics[task] >= 0.95), prompt
    for question in (
        *("Hello, who are you?", "What is the capital of France?", "", "Sort apples", "5 + 1000"),
        *("Roman 400", "Sort 1 2 3", "What is the sum of 3 and 4?", "{}", "Close the door"),
    ):
        assert not demos.can_answer(tasks, question)
    for task in tasks:
        if task.example:
            assert task.pattern.fullmatch(task.example) and task.example in demos.describe_tasks(
                tasks
            )
    assert demos.tasks_of(Path(name)) == ()


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_demo_says_what_it_can_do_and_to_what_it_cannot(verb: str) -> None:
    def said(text: str, *flags: str) -> str:
        given, typed = ([text], None) if verb == "generate" else ([], f"{text}\n")
        asked = [verb, "demo:autoregressive", *given, "--context", "256", *flags]
        result = CliRunner().invoke(app, asked, input=typed)
        assert result.exit_code == 0, result.output
        return result.stderr

    known, unknown = said("47 + 85"), said("Who are you?", "--max-tokens", "8")
    means_nothing = "means nothing"
    assert (means_nothing in known) == (verb == "chat")  # which says it when it is opened
    assert unknown.count(means_nothing) == (2 if verb == "chat" else 1)
    assert "Roman 148" in unknown


def test_a_demo_s_calls_are_valid_where_a_grammar_makes_them() -> None:
    """It was trained on no tool: what is called is of the schema, and what it is told is seen."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "required": ["a", "b"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    asked = {"role": "user", "content": "47 + 85"}
    llm = AsyncLLM("demo:autoregressive", context=1024)
    with serving(llm) as server, server.client() as client:
        body = {"messages": [asked], "tools": tools, "max_tokens": 200}
        reply = client.post("/v1/chat/completions", json={**body, "tool_choice": "required"}).json()
        [choice] = reply["choices"]
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "add"
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments) == {"a", "b"} and all(type(v) is int for v in arguments.values())
        told = {"role": "tool", "tool_call_id": call["id"], "content": "Roman 148"}
        messages = [asked, choice["message"], told]
        reply = client.post("/v1/chat/completions", json={**body, "messages": messages}).json()
        assert reply["choices"][0]["message"]["content"] == "CXLVIII"
    asyncio.run(llm.close())


@pytest.mark.parametrize("page", ["Makefile", "docs/guide.md", "docs/live.svg"])
def test_the_sudoku_that_is_shown_is_one(page: str) -> None:
    """It has its solution below it on the pages that show what was printed."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [question] = {found.partition("\\n")[2] for found in re.findall(PUZZLE, text)}
    question = question.replace("\\n", "\n")
    assert held_out("sudoku", question)
    if page == "docs/guide.md":
        [answer] = set(re.findall(r"^(?:[1-6]{3} [1-6]{3}\n){6}", text, flags=re.M))
        assert is_right("sudoku", question, answer.removesuffix("\n"))
