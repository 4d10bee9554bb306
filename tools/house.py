"""Counts what must be held in the head to change lowtide: `python tools/house.py [FOLDER]`.

Sizes, long functions and files, class names that are used twice, circles of imports, words that
are not plain English; one line each.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

MOST_FUNCTION_LINES, MOST_FILE_LINES = 40, 400
_PARTS = ("src", "tests", "benchmarks", "tools")
_LAYOUT = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_PRIVATE_WORDS = re.compile(r"(?i)\b(nobody|whoever|somebody|anew|whom|everybody)\b")
_OF = re.compile(r'(?:"""|# |[.] )Of\b')
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Source(NamedTuple):
    path: Path
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @property
    def num_tokens(self) -> int:
        """Tokens of the grammar: neither comments nor line ends nor indentation."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(token.type not in _LAYOUT for token in tokens)

    @property
    def num_statements(self) -> int:
        return sum(isinstance(node, ast.stmt) for node in ast.walk(self.tree))


def main() -> None:
    root = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent.parent
    for name, value in measured(root).items():
        print(f"{name:55} {value}")


def measured(root: Path) -> dict[str, str]:
    """What there is below a source tree, by what it is called."""
    parts = {part: list(sources(root / part)) for part in _PARTS}
    package, tests = parts["src"], parts["tests"]
    num_public, num_told = _docstrings(package)
    cpp = [*(root / "src").rglob("*.cpp"), *(root / "src").rglob("*.hpp")]
    return {
        "Python of the package: lines; tokens; statements": "; ".join(
            f"{sum(values):,}"
            for values in zip(
                *((one.num_lines, one.num_tokens, one.num_statements) for one in package),
                strict=True,
            )
        ),
        "tests: lines; tokens": (
            f"{sum(one.num_lines for one in tests):,}; {sum(one.num_tokens for one in tests):,}"
        ),
        "package, tests, benchmarks, tools: lines": (
            f"{sum(one.num_lines for sources in parts.values() for one in sources):,}"
        ),
        "public functions with a docstring": f"{num_told:,} of {num_public:,}",
        "C++: lines": f"{sum(path.read_text().count(chr(10)) for path in cpp):,}",
        f"functions above {MOST_FUNCTION_LINES} lines": _listed(_long_functions(package)),
        f"files above {MOST_FILE_LINES} lines": _listed(
            one.path.name for one in package if one.num_lines > MOST_FILE_LINES
        ),
        "class names used twice": _listed(_repeated_classes(package)),
        "import circles at run time: modules": _listed(
            str(len(circle)) for circle in circles(imports_of(root / "src", package, False))
        ),
        "import circles with TYPE_CHECKING: modules": _listed(
            str(len(circle)) for circle in circles(imports_of(root / "src", package, True))
        ),
        "README: lines": f"{(root / 'README.md').read_text().count(chr(10))}",
        "docs/design.md: bytes": f"{(root / 'docs' / 'design.md').stat().st_size:,}",
        "words of a private English in the package": _number(_PRIVATE_WORDS, package),
        "sentences that begin with Of": _number(_OF, package),
    }


def sources(folder: Path) -> Iterator[Source]:
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        yield Source(path, text, ast.parse(text))


def _number(pattern: re.Pattern[str], sources: list[Source]) -> str:
    return str(sum(len(pattern.findall(one.text)) for one in sources))


def _listed(found: Iterator[str]) -> str:
    """How many, and which."""
    names = list(found)
    return f"{len(names)}" + (f" ({', '.join(names)})" if names else "")


def _docstrings(sources: list[Source]) -> tuple[int, int]:
    """Functions and methods whose names are public, and those of them that have a docstring."""
    functions = [
        node
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, _FUNCTIONS) and not node.name.startswith("_")
    ]
    return len(functions), sum(ast.get_docstring(node) is not None for node in functions)


def _long_functions(sources: list[Source]) -> Iterator[str]:
    """Kernels of Triton apart, which cannot be divided."""
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, _FUNCTIONS) or "triton" in source.path.name:
                continue
            if (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES:
                yield f"{source.path.stem}.{node.name}"


def _repeated_classes(sources: list[Source]) -> Iterator[str]:
    names = Counter(
        node.name
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    )
    return (name for name, count in sorted(names.items()) if count > 1)


# Imports


def imports_of(folder: Path, sources: list[Source], with_types: bool) -> dict[str, set[str]]:
    """The package's own modules that each imports, whenever it does."""
    modules = {_module(one.path.relative_to(folder)): one for one in sources}
    return {
        name: {
            target
            for node in _import_nodes(one.tree, with_types)
            for target in _targets(node, modules)
            if target != name
        }
        for name, one in modules.items()
    }


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _import_nodes(node: ast.AST, with_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            if with_types:
                yield from _import_nodes(child, with_types)
        else:
            yield from _import_nodes(child, with_types)


def _targets(node: ast.Import | ast.ImportFrom, modules: Mapping[str, Source]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in modules else str(node.module) for name in names]
    return (name for name in names if name in modules)


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that all reach each other, the largest first (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in sorted(imports[name]):
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            at = stack.index(name)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                found.append(sorted(group))

    for name in imports:
        if name not in order:
            visit(name)
    return sorted(found, key=len, reverse=True)


if __name__ == "__main__":
    main()
