"""Training tasks of the demo models: questions with one right answer, drawn from a seed.

One question of ten is held out, by its hash; training never sees it in any wording.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from operator import eq
from typing import NamedTuple

NUM_TEXT_TURNS = 1000
KEYS = "age area city code cost depth goal mass rank size team time unit width year zone".split()
ROMAN = {100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}


class Example(NamedTuple):
    prompt: str
    answer: str


def draw(task: str, source: random.Random, is_held_out: bool) -> Example:
    """Draw an example of one task, from the training or the held-out questions."""
    make, phrases = TASKS[task]
    while True:
        question, answer = make(source)
        if held_out(task, question) == is_held_out:
            return Example(source.choice(phrases).format(question), answer)


def held_out(task: str, question: str) -> bool:
    """Return True if training leaves a question out."""
    return int(hashlib.sha256(f"{task} {question}".encode()).hexdigest(), 16) % 10 == 0


def as_turn(example: Example) -> str:
    """Format an example by the demo models' chat template."""
    return f"<|user|>{example.prompt}<|role_end|><|assistant|>{example.answer}<|role_end|>"


def held_out_text() -> str:
    """Make a conversation of held-out questions, about 60,000 characters."""
    source = random.Random(0)
    turns = (draw(source.choice(SHORT_TASKS), source, True) for _ in range(NUM_TEXT_TURNS))
    return "".join(map(as_turn, turns))


def _sum(source: random.Random) -> Example:
    first, second = source.randrange(100), source.randrange(100)
    return Example(f"{first} + {second}", str(first + second))


def _sort(source: random.Random) -> Example:
    numbers = [source.randrange(10, 100) for _ in range(source.randint(3, 6))]
    return Example(" ".join(map(str, numbers)), " ".join(map(str, sorted(numbers))))


def _roman(source: random.Random) -> Example:
    number = rest = source.randint(1, 399)
    letters = ""
    for value, letter in ROMAN.items():
        letters += letter * (rest // value)
        rest %= value
    return Example(str(number), letters)


def _json_end(source: random.Random) -> Example:
    """Draw a JSON text with open brackets, and the text that closes them."""
    text, end = "", ""
    for _ in range(source.randint(1, 4)):
        if source.random() < 0.5:
            text, end = text + f'{{"{source.choice(KEYS)}": ', "}" + end
        else:
            text, end = text + f"[{source.randrange(1000)}, ", "]" + end
    return Example(f"{text}{source.randrange(1000)}", end)


def _json_value(source: random.Random) -> Example:
    """Draw a JSON object and a question for one key's value."""
    values = {key: source.randrange(1000) for key in source.sample(KEYS, source.randint(2, 4))}
    key = source.choice(list(values))
    return Example(f"{key} of {json.dumps(values)}", str(values[key]))


# A grid is 36 digits, row by row, 0 where it is blank; its boxes have 2 rows and 3 columns.


def _sudoku(source: random.Random) -> Example:
    """Draw a grid of 10 to 14 blanks, each of which follows from the digits around it in turn."""
    grid = _shuffled(source.choice(_full_grids()), source)
    while True:
        blanks = set(source.sample(range(36), source.randint(10, 14)))
        puzzle = [0 if cell in blanks else digit for cell, digit in enumerate(grid)]
        if _follows(puzzle):
            return Example(_as_text(puzzle), _as_text(grid))


def _as_text(grid: Sequence[int]) -> str:
    digits = "".join(map(str, grid)).replace("0", ".")
    return "\n".join(f"{digits[at : at + 3]} {digits[at + 3 : at + 6]}" for at in range(0, 36, 6))


@cache
def _full_grids() -> list[list[int]]:
    return [_filled([0] * 36, random.Random(seed)) for seed in range(64)]


def _filled(grid: list[int], source: random.Random) -> list[int]:
    """Fill a grid's blanks at random; return an empty list if that is impossible."""
    blanks = [cell for cell, digit in enumerate(grid) if not digit]
    if not blanks:
        return grid
    cell = min(blanks, key=lambda cell: len(_options(grid, cell)))
    options = _options(grid, cell)
    for digit in source.sample(options, len(options)):
        if found := _filled([*grid[:cell], digit, *grid[cell + 1 :]], source):
            return found
    return []


def _shuffled(grid: Sequence[int], source: random.Random) -> list[int]:
    """Permute digits, rows and columns of a full grid."""
    bands = source.sample((0, 2, 4), 3)
    rows = [band + row for band in bands for row in source.sample((0, 1), 2)]
    stacks = source.sample((0, 3), 2)
    columns = [stack + column for stack in stacks for column in source.sample(range(3), 3)]
    digits = source.sample(range(1, 7), 6)
    return [digits[grid[6 * row + column] - 1] for row in rows for column in columns]


def _options(grid: Sequence[int], cell: int) -> list[int]:
    """Return the digits allowed in a cell by its row, column and box."""
    seen = {grid[other] for other in _peers()[cell]}
    return [digit for digit in range(1, 7) if digit not in seen]


@cache
def _peers() -> list[list[int]]:
    def units(cell: int) -> tuple[int, int, int]:
        row, column = divmod(cell, 6)
        return row, column, row // 2 * 2 + column // 3

    cells = range(36)
    shared = [[sum(map(eq, units(a), units(b))) for b in cells] for a in cells]
    return [[b for b in cells if a != b and shared[a][b]] for a in cells]


def _follows(puzzle: list[int]) -> bool:
    grid = list(puzzle)
    blanks = [cell for cell, digit in enumerate(grid) if not digit]
    while blanks:
        sure = {cell: found[0] for cell in blanks if len(found := _options(grid, cell)) == 1}
        if not sure:
            return False
        for cell, digit in sure.items():
            grid[cell] = digit
        blanks = [cell for cell in blanks if cell not in sure]
    return True


TASKS: dict[str, tuple[Callable[[random.Random], Example], tuple[str, ...]]] = {
    "sum": (_sum, ("{}", "{} =", "What is {}?")),
    "sort": (_sort, ("Sort {}", "sort {}")),
    "roman": (_roman, ("Roman {}", "{} in Roman numerals")),
    "json end": (_json_end, ("Close {}", "Complete {}")),
    "json value": (_json_value, ("Get {}", "What is {}?")),
    "sudoku": (_sudoku, ("Solve sudoku:\n{}",)),
}
"""By task: the function that draws a question and answer, and phrases that ask it."""

SHORT_TASKS = [task for task in TASKS if task != "sudoku"]
