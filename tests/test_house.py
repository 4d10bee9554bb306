"""`tools/house.py`: what it counts in a small tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import house

FILES = {
    "src/own/__init__.py": "",
    "src/own/first.py": '"""Of numbers."""\nfrom own import second\n\n\nclass Twice:\n    pass\n',
    "src/own/second.py": (
        "def late():\n    # Nobody asks anew.\n    from own.first import Twice\n    return Twice\n"
    ),
    "src/own/third.py": (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import own.fourth\n\n\n"
        "class Twice:\n    pass\n"
    ),
    "src/own/fourth.py": 'import own.third\n\n\ndef public():\n    """It says so."""\n',
    "src/own/kernel.cpp": "int one;\nint two;\n",
    "tests/test_own.py": "assert 1\n",
    "README.md": "one\n",
    "docs/design.md": "four\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_what_is_counted(tree: Path) -> None:
    assert house.measured(tree) == {
        "Python of the package: lines; tokens; statements": "23; 52; 15",
        "tests: lines; tokens": "1; 3",
        "package, tests, benchmarks, tools: lines": "24",
        "public functions with a docstring": "1 of 2",
        "C++: lines": "2",
        "functions above 40 lines": "0",
        "files above 400 lines": "0",
        "class names used twice": "1 (Twice)",
        "import circles at run time: modules": "1 (2)",
        "import circles with TYPE_CHECKING: modules": "2 (2, 2)",
        "README: lines": "1",
        "docs/design.md: bytes": "5",
        "words of a private English in the package": "2",
        "sentences that begin with Of": "1",
    }


def test_circles_are_groups_that_reach_each_other() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert house.circles(imports) == [["a", "b", "c"], ["d", "e"]]
