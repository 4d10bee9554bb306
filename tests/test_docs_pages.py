"""Pages for people in trouble and in doubt: what they quote and name is so; README leads to all."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide import errors
from lowtide.cli.app import app
from lowtide.cli.options import FLAGS
from lowtide.errors import LowtideError
from lowtide.option import in_words

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TROUBLE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
VARIES = "…"


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def messages() -> list[str]:
    """All strings of the package as the command line shows them, `…` for what is put into them."""
    found = []
    for path in sorted((ROOT / "src" / "lowtide").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else VARIES for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [in_words(message, FLAGS) for message in found]


def test_every_error_has_a_section_and_its_kind() -> None:
    told = sections(TROUBLE)
    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass)]
    assert len(kinds) > 5
    for kind in kinds:
        assert issubclass(kind, LowtideError) and kind.__name__ in told
        [parent] = kind.__bases__
        if parent not in (LowtideError, Exception):
            assert f"`{parent.__name__}`" in told[kind.__name__]
    assert {name for name in told if name.endswith("Error")} == {k.__name__ for k in kinds}


def test_quoted_messages_are_the_program_s() -> None:
    quoted = re.findall(r"^\| `([^`]+)` \|", TROUBLE, flags=re.MULTILINE)
    assert len(quoted) > 20
    known = "\n".join(messages())
    for message in quoted:
        pattern = "[^\n]*".join(map(re.escape, message.split(VARIES)))
        assert re.search(pattern, known), message


def test_words_are_in_order_and_none_is_told_twice() -> None:
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^- \*\*(.+?)\*\*", page, flags=re.MULTILINE)
    assert words == sorted(words, key=str.lower) and len(set(words)) == len(words)
    wanted = "ring slot resident home drift tau budget demand placement"
    assert {*wanted.split(), "hit rate"} <= {word.lower() for word in words}


def test_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in readme]
    assert not missing


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in anchors, target


def test_the_log_lists_every_page_once_and_a_page_says_when_it_was_written() -> None:
    listed = re.findall(
        r"^- (\d{4}-\d\d-\d\d) \[(.+)\]\((.+)\)$",
        (DOCS / "log" / "README.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    pages = {path.name: path for path in (DOCS / "log").glob("2*.md")}
    assert sorted(name for _, _, name in listed) == sorted(pages)
    for date, title, name in listed:
        first, _, second = pages[name].read_text(encoding="utf-8").splitlines()[:3]
        assert first == f"# {title}" and second.startswith(f"*{date}") and name.startswith(date)


def test_the_structure_has_every_room_and_names_files_that_exist() -> None:
    package = ROOT / "src" / "lowtide"
    page = (DOCS / "structure.md").read_text(encoding="utf-8")
    rooms = {path.name for path in package.iterdir() if path.is_dir() and path.name[0].isalpha()}
    assert set(re.findall(r"^\| `(\w+)/` \|", page, flags=re.MULTILINE)) == rooms
    for line in page.splitlines():
        room = re.match(r"\| `(\w+)/` \|", line)
        places = [package, package / "decode", *([package / room[1]] if room else [])]
        for name in re.findall(r"`([\w/*]+\.(?:py|cpp|hpp))`", line):
            assert any(list(place.glob(name)) for place in places), name


@pytest.mark.parametrize("page", sorted((DOCS / "how").glob("*.md")), ids=lambda path: path.stem)
def test_files_that_rooms_name_are_there(page: Path) -> None:
    files = [
        path
        for folder in ("src", "tests", "benchmarks", "tools", "examples")
        for path in (ROOT / folder).rglob("*.*")
    ]
    named = re.findall(r"`([\w./*-]+/[\w*-]+\.(?:py|cpp|hpp))`", page.read_text(encoding="utf-8"))
    gone = [name for name in set(named) if not any(path.match(name) for path in files)]
    assert not [name for name in gone if "NAME" not in name]


# What a reader meets first


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_begins_with_what_it_is_and_what_runs_at_once() -> None:
    """A demo, then a file that one has, then a model of the hub."""
    assert README.startswith("# lowtide\n") and "](docs/live.svg)" in README.partition("\n## ")[0]
    told = sections(README)
    assert list(told)[:4] == ["Install", "Use", "Models", "Not yet"] and "Measured" in told
    blocks = re.findall(r"```sh\n(.*?)```", told["Use"], flags=re.DOTALL)
    at_once, own, of_hub = [[line.split()[1:3] for line in block.splitlines()] for block in blocks]
    assert [verb for verb, _ in at_once] == ["generate", "chat"]
    assert all(model == "demo:autoregressive" for _, model in at_once)
    assert all(model.endswith(".gguf") for _, model in own)
    assert all(f"| `{model}` |" in told["Models"] for _, model in of_hub)


def test_what_readme_runs_at_once_says_what_stands_beside_it() -> None:
    block = sections(README)["Use"].partition("```sh\n")[2].partition("```")[0]
    command, _, answer = block.splitlines()[0].partition(" # ")
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0 and result.stdout.strip() == answer.strip()
    typed = re.findall(r"try (.+), (.+);", block)[0]
    result = CliRunner().invoke(app, ["chat", "demo:autoregressive"], input="\n".join(typed))
    assert result.stdout.split() == ["132", "CXLVIII"]


def test_readme_installs_without_a_gpu_first_and_says_what_every_package_is_for() -> None:
    told = sections(README)
    ways = ["uv tool install --torch-backend cpu", "--torch-backend auto", "With pip alone"]
    places = [told["Install"].find(way) for way in ways]
    assert -1 not in places and places == sorted(places)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split("[^a-z-]", each)[0] for each in project["dependencies"]]
    assert "torch" in names
    missing = [name for name in names if name not in told["More on installing"]]
    assert not missing
