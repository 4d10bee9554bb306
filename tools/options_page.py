"""Write the pages and the module that are made of the declared options.

These are docs/options.md, the tables of docs/python.md, and answers/keywords.py for type checkers
and editors. A test compares them.

python tools/options_page.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lowtide.cli.options import FLAGS, OPTIONS
from lowtide.cli.verbs import OWN_VERBS
from lowtide.engine.opening.config import EngineConfig
from lowtide.option import Group, Kind, Option, in_words, options_of
from lowtide.params import DiffusionParams, SamplingParams

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "options.md"
KEYWORDS = _ROOT / "src" / "lowtide" / "answers" / "keywords.py"
PYTHON_PAGE = _ROOT / "docs" / "python.md"

HEAD = """# Options

Written by `tools/options_page.py` from the declarations in `src/lowtide/`: \
`engine/opening/config.py`, `params.py`, `serve/settings.py`, `cli/options.py` and `lab/options.py`.

An option is a flag, an environment variable and a key of a TOML file that `--config` names: \
`--host-memory 12GiB`, `LOWTIDE_HOST_MEMORY=12GiB` and `host_memory = "12GiB"` say the same. \
A flag wins over the environment, that over the file, that over the default. A flag that may be \
repeated is an array or a table in a file, and JSON in a variable. A whole number may end in k: \
`8k` is 8192. `--help` shows the options in \
bold, `--help-all` all of them.
"""

KEYWORDS_HEAD = '''"""Keywords of `LLM(...)` and of `generate(...)`, for type checkers and editors.

Written by tools/options_page.py from `EngineConfig`, `SamplingParams` and `DiffusionParams`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from lowtide.params import DiffusionParams
from lowtide.policies.recipe import Recipe
from lowtide.progress import Progress
'''


def page() -> str:
    """All of docs/options.md."""
    return "\n".join([HEAD, *(section for group in Group if (section := _section(group)))])


def _section(group: Group) -> str:
    options = [option for option in OPTIONS if option.group is group]
    if not options:
        return ""
    rows = [
        f"## {group.value}",
        "",
        "| flag | key | value | default | is | of |",
        "|---|---|---|---|---|---|",
        *map(_row, options),
        "",
    ]
    return "\n".join(rows)


def _row(option: Option) -> str:
    flag = f"`{option.flag}`" + (f", `{option.short}`" if option.short else "")
    flag = f"**{flag}**" if option.is_common else flag
    value = option.kind.value + (", repeatable" if option.is_repeatable else "")
    default = "" if option.default is None else f"`{option.shown_default}`"
    told = _linked(in_words(option.help, FLAGS))
    return f"| {flag} | `{option.name}` | {value} | {default} | {told} | {_verbs(option)} |"


def _verbs(option: Option) -> str:
    """The verbs that take an option; most take those of models and output."""
    names = [
        name
        for name, verb in OWN_VERBS.items()
        if verb.line and option.name in inspect.signature(verb.load()).parameters
    ]
    return ", ".join(names)


def keywords() -> str:
    """All of answers/keywords.py."""
    parts = [
        KEYWORDS_HEAD,
        *_typed_dict("ModelKeywords", "Options of a model.", [EngineConfig]),
        *_typed_dict(
            "AnswerKeywords",
            "Fields of `SamplingParams` and `DiffusionParams`.",
            [SamplingParams, DiffusionParams],
        ),
    ]
    return "\n".join(parts)


def _typed_dict(name: str, says: str, classes: list[Any]) -> list[str]:
    """Return a class's lines.

    A mapping may be None, which is the same as empty. Editors show the text under a key as its
    documentation.
    """
    lines = ["", f"class {name}(TypedDict, total=False):", f'    """{says}"""']
    for declared in classes:
        types = {field.name: field.type for field in fields(declared)}
        for option in options_of(declared):
            key = option.keyword
            kind = "str | Recipe" if key == "policy" else types[key]
            optional = " | None" if kind.startswith("Mapping") else ""
            told = textwrap.wrap(f'"""{_in_python(option.help)}"""', width=96)
            lines += ["", f"    {key}: {kind}{optional}", *(f"    {line}" for line in told)]
    return [*lines, ""]


def python_page(text: str) -> str:
    """docs/python.md with its tables of options."""
    for head, declared in _TABLES.items():
        before, _, rest = text.partition(head)
        _, _, after = rest.partition("\n\n")
        defaults = inspect.signature(declared).parameters
        rows = [_python_row(option, defaults, "default" in head) for option in options_of(declared)]
        text = f"{before}{head}{''.join(rows)}\n{after}"
    return text


_TABLES: dict[str, Any] = {
    "| option | default | is |\n|---|---|---|\n": EngineConfig,
    "| `SamplingParams` | default | is |\n|---|---|---|\n": SamplingParams,
    "| `DiffusionParams` | is |\n|---|---|\n": DiffusionParams,
}
"""Class whose options a table lists, by the head of the table."""


def _python_row(
    option: Option, defaults: Mapping[str, inspect.Parameter], has_default: bool
) -> str:
    shown = repr(defaults[option.keyword].default)
    if option.kind in (Kind.PAIRS, Kind.JSON_PAIRS):
        shown = "None"  # the same as empty
    elif option.keyword == "diffusion":
        shown = "DiffusionParams()"
    told = _linked(_in_python(option.help))
    return f"| `{option.keyword}` | {f'`{shown}` | ' if has_default else ''}{told} |\n"


def _in_python(help: str) -> str:
    """A help text without what only the command line has."""
    return help.replace(" (--json)", "")


def _linked(help: str) -> str:
    """A help text for a page in docs/: other pages are links."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", help).replace("|", "\\|")


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    PYTHON_PAGE.write_text(python_page(PYTHON_PAGE.read_text("utf-8")), encoding="utf-8")
