"""Count the held-out questions that the demo models answer right, task by task.

    python tools/demo_accuracy.py    # or make demo-accuracy; 2 minutes

Prints them and keeps them in each model's metrics.json, whose numbers README shows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from lowtide import LLM
from lowtide.model_folder.demo_tasks import SHORT_TASKS, TASKS, as_turn, draw
from lowtide.model_folder.demos import DEMO_FOLDER, DEMO_NAMES

NUM_QUESTIONS = 200
NUM_CONVERSATIONS, NUM_TURNS = 50, 4


def by_task(llm: LLM) -> Iterator[tuple[str, list[bool]]]:
    """Yield each task and, for each of its distinct questions, True if it was answered right."""
    for task in TASKS:
        source = random.Random(task)
        examples = list(dict.fromkeys(draw(task, source, True) for _ in range(NUM_QUESTIONS)))
        # As the template writes it; a process for each takes longer than its answer.
        prompts = [
            as_turn(example).partition("<|assistant|>")[0] + "<|assistant|>" for example in examples
        ]
        answers = llm.generate(prompts, temperature=0, progress=False, raw=True)
        yield task, [a.text == e.answer for a, e in zip(answers, examples, strict=True)]


def in_conversations(llm: LLM) -> list[bool]:
    """Judge each answer but the first in conversations of several tasks; True for right ones."""
    source = random.Random("conversation")
    conversations: list[list[dict[str, str]]] = [[] for _ in range(NUM_CONVERSATIONS)]
    right: list[bool] = []
    for turn in range(NUM_TURNS):
        asked = [draw(source.choice(SHORT_TASKS), source, True) for _ in conversations]
        for messages, example in zip(conversations, asked, strict=True):
            messages.append({"role": "user", "content": example.prompt})
        answers = [answer.text for answer in llm.chat(conversations, temperature=0, progress=False)]
        for messages, answer in zip(conversations, answers, strict=True):
            messages.append({"role": "assistant", "content": answer})
        if turn:
            right += [a == e.answer for a, e in zip(answers, asked, strict=True)]
    return right


def main() -> None:
    for name in DEMO_NAMES:
        with LLM(f"demo:{name}", context=512) as llm:
            right = dict(by_task(llm)) | {"conversation": in_conversations(llm)}
        metrics = {task: round(sum(each) / len(each), 3) for task, each in right.items()}
        for task, share in metrics.items():
            print(f"demo:{name}  {task}  {share:.1%} of {len(right[task])}", flush=True)
        path = DEMO_FOLDER / name / "metrics.json"
        path.write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
