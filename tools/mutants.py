"""Small faults put into the code on purpose, and the tests that find them.

    python tools/mutants.py draw 60 --seed 1   # draws faults anew and records who finds them
    python tools/mutants.py run                # whether each fault that was found still is
    python tools/mutants.py run KVCache Link   # those of functions with these words in their names

A fault changes one line: a drawn one an operator or a number of it, one that was written by hand
whatever breaks a promise of docs/design.md or docs/how/. It is recorded in `tools/mutants.jsonl` by
the function it is in and by the line's text, so that it is the same fault after that function moved
to another file. Each is put into a copy of the tree, and those tests run that speak of its place,
at most `NUM_RELATED` files of them. A fault that they do not find is recorded with `found_by` null:
that is no proof that the whole suite would not.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tools" / "mutants.jsonl"
NUM_RELATED = 10
CPP_SHARE = 4  # one fault in so many is in C++
LIMIT_S = 400.0  # for the tests of one fault; a test that hangs has found it
CHANGES = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " + ": " - ",
    " - ": " + ",
    " += ": " -= ",
    " and ": " or ",
    " or ": " and ",
    " && ": " || ",
    "if not ": "if ",
    "min(": "max(",
    "max(": "min(",
    "True": "False",
    " + 1": " + 2",
    " - 1": "",
    "std::min": "std::max",
}
"""Replacements of a mutant, each made once in a line."""
# None is drawn in these: they are faults of tests, of words or of a machine that is not here.
_LEFT_OUT = re.compile(r"cuda|triton|_text|errors|__main__|/cli/|/lab/|schemas|unruly")


@dataclass(frozen=True)
class Fault:
    """A changed line. `within`: the function's qualified name; a C++ file's is empty."""

    within: str
    line: str
    changed: str
    found_by: str | None = None
    promise: str = ""  # that it breaks, and where it is made; of a fault written by hand

    def as_json(self) -> str:
        fields = asdict(self)
        if not self.promise:
            del fields["promise"]
        return json.dumps(fields, ensure_ascii=False)


def main() -> int:
    """0 where all recorded faults that were found still are."""
    parser = argparse.ArgumentParser(description="Faults on purpose, and who finds them.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    draw = verbs.add_parser("draw", help="draw other faults and record who finds them")
    draw.add_argument("num_faults", type=int)
    draw.add_argument("--seed", type=int, default=0)
    again = verbs.add_parser("run", help="whether recorded faults are still found")
    again.add_argument("words", nargs="*", help="of names of functions; all where none is given")
    options = parser.parse_args()
    if options.verb == "draw":
        return _record(options.num_faults, options.seed)
    return _run_again(options.words)


def _record(num_faults: int, seed: int) -> int:
    drawn = _drawn(num_faults, seed)
    by_hand = [fault for fault in _recorded() if fault.promise]
    RECORDED.write_text("".join(fault.as_json() + "\n" for fault in by_hand))
    for number, fault in enumerate(drawn, 1):
        found = replace(fault, found_by=_found_by(fault))
        with RECORDED.open("a") as file:
            file.write(found.as_json() + "\n")
        print(f"{number}: {found.within or 'C++'}: {found.changed}: {found.found_by}", flush=True)
    return 0


def _recorded() -> list[Fault]:
    return [Fault(**json.loads(line)) for line in RECORDED.read_text().splitlines()]


def _run_again(words: Sequence[str]) -> int:
    faults = [fault for fault in _recorded() if fault.found_by]
    if words:
        faults = [each for each in faults if any(word in each.within for word in words)]
    missed = gone = 0
    for fault in faults:
        try:
            found_by = _found_by(fault)
        except LookupError:
            gone += 1
            print(f"gone: {fault.within or 'C++'}: {fault.line}", flush=True)
            continue
        if not found_by:
            missed += 1
            print(f"not found any more: {fault.within or 'C++'}: {fault.changed}", flush=True)
    print(f"{len(faults)} faults were found, {missed} of them are not now, {gone} are gone")
    return 1 if missed else 0


# Places


def _lines(root: Path) -> dict[tuple[str, str], list[tuple[Path, int]]]:
    """Map each line of a function to where it stands. Line numbers count from 0."""
    places: dict[tuple[str, str], list[tuple[Path, int]]] = {}
    for path in sorted((root / "src").rglob("*")):
        if path.suffix not in (".py", ".cpp", ".hpp"):
            continue
        text = path.read_text().splitlines()
        owners = _owners(text) if path.suffix == ".py" else ["" for _ in text]
        for number, (within, line) in enumerate(zip(owners, text, strict=True)):
            if within is not None:
                places.setdefault((within, line.strip()), []).append((path, number))
    return places


def _owners(text: Sequence[str]) -> list[str | None]:
    """The function of each line that is code; None elsewhere."""
    owners: list[str | None] = [None] * len(text)

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                visit(child, f"{name}.{child.name}".lstrip("."))
            elif isinstance(node, ast.FunctionDef) and isinstance(child, ast.stmt):
                is_text = isinstance(child, ast.Raise) or _is_docstring(child)
                for number in range(child.lineno - 1, child.end_lineno or 0):
                    owners[number] = None if is_text else name

    visit(ast.parse("\n".join(text)), "")
    return owners


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _drawn(num_faults: int, seed: int) -> list[Fault]:
    """Faults whose line is the only one of its text in its function; no two in one function."""
    places = {
        key: found[0]
        for key, found in _lines(ROOT).items()
        if len(found) == 1 and not _LEFT_OUT.search(str(found[0][0])) and _can_change(key[1])
    }
    draw = random.Random(seed)
    cpp = [key for key in places if not key[0]]
    python = [key for key in places if key[0]]
    num_cpp = num_faults // CPP_SHARE
    faults = [_fault(draw, *key) for key in draw.sample(cpp, num_cpp)]
    draw.shuffle(python)
    chosen = list({key[0]: key for key in python}.values())[: num_faults - num_cpp]
    return [*faults, *(_fault(draw, *key) for key in chosen)]


def _can_change(line: str) -> bool:
    is_text = line.startswith(
        ("#", "//", '"', "f'", 'f"', "@", "template", "raise", "static_assert")
    )
    return not is_text and any(before in line for before in CHANGES)


def _fault(draw: random.Random, within: str, line: str) -> Fault:
    before = draw.choice([before for before in CHANGES if before in line])
    return Fault(within, line, line.replace(before, CHANGES[before], 1))


# Tests


def _found_by(fault: Fault) -> str | None:
    """The first test that fails with a fault; LookupError if its place is gone."""
    with tempfile.TemporaryDirectory(prefix="lowtide-mutant-") as name:
        copy = Path(name)
        for path in _tracked():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, copy / path)
        found = _lines(copy).get((fault.within, fault.line), [])
        if len(found) != 1:
            raise LookupError(fault.line)
        path, number = found[0]
        lines = path.read_text().splitlines(keepends=True)
        lines[number] = lines[number].replace(fault.line, fault.changed)
        path.write_text("".join(lines))
        files = list(_related(copy, path.relative_to(copy / "src"), fault))
        return _first_failure(copy, files)


def _tracked() -> list[str]:
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    return [name for name in subprocess.check_output(git, text=True).splitlines() if name]


def _related(copy: Path, module: Path, fault: Fault) -> Iterator[str]:
    """Files of tests that speak most of a module, its function and its class."""
    dotted = ".".join(module.with_suffix("").parts)
    names = [dotted, module.stem, *(part for part in fault.within.split(".") if part)]
    tests = sorted((copy / "tests").glob("test_*.py"))
    scores: dict[Path, int] = {}
    for test in tests:
        text = test.read_text()
        scores[test] = sum(len(re.findall(rf"\b{re.escape(name)}\b", text)) for name in names)
    if fault.found_by:
        yield fault.found_by.partition("::")[0]
    best = sorted(tests, key=lambda test: -scores[test])[:NUM_RELATED]
    yield from (str(test.relative_to(copy)) for test in best if scores[test])
    if module.suffix != ".py":
        yield from (f"tests/test_{name}.py" for name in ("cpu_kernels", "packed_kernels"))
    yield from (f"tests/test_{name}.py" for name in ("end_to_end", "runtime", "llm_goldens"))


def _first_failure(copy: Path, files: Sequence[str]) -> str | None:
    present = [name for name in dict.fromkeys(files) if (copy / name).exists()]
    num_workers = str(len(os.sched_getaffinity(0)))
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    pytest += [
        "-n",
        num_workers,
        "-m",
        "not slow and not gpu and not ray and not haproxy and not browser",
    ]
    pytest += present
    variables = {**os.environ, "PYTHONPATH": str(copy / "src"), "HYPOTHESIS_PROFILE": "ci"}
    try:
        done = subprocess.run(
            pytest, cwd=copy, env=variables, timeout=LIMIT_S, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return f"{present[0]}::hangs"
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failures:
        return str(failures[0])
    return f"{present[0]}::ends with {done.returncode}" if done.returncode else None


if __name__ == "__main__":
    sys.exit(main())
