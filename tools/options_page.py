"""Writes what is made of the declared options: docs/options.md, and the keywords of `LLM` and
`generate` for type checkers; a test compares them.

python tools/options_page.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from lowtide.cli.options import OPTIONS
from lowtide.cli.verbs import OWN_VERBS
from lowtide.engine.opening.config import EngineConfig
from lowtide.option import Group, Option
from lowtide.params import DiffusionParams, SamplingParams

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "options.md"
KEYWORDS = _ROOT / "src" / "lowtide" / "answers" / "keywords.py"

HEAD = """# Options

Written by `tools/options_page.py` from the declarations in `src/lowtide/`: \
`engine/opening/config.py`, `params.py`, `serve/settings.py` and `cli/options.py`.

An option is a flag, an environment variable and a key of a TOML file that `--config` names: \
`--host-memory 12GiB`, `LOWTIDE_HOST_MEMORY=12GiB` and `host_memory = "12GiB"` say the same. \
A flag wins over the environment, that over the file, that over the default. A flag that may be \
repeated is an array or a table in a file, and JSON in a variable. `--help` shows the options in \
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
    told = option.help.replace("|", "\\|")
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
        *_typed_dict("ModelKeywords", "Options of a model.", fields(EngineConfig)),
        *_typed_dict(
            "AnswerKeywords",
            "Fields of `SamplingParams` and `DiffusionParams`.",
            (*fields(SamplingParams), *fields(DiffusionParams)),
        ),
    ]
    return "\n".join(parts)


def _typed_dict(name: str, says: str, keys: Iterable[Field[Any]]) -> list[str]:
    """A class's lines; a mapping may be None, which is the same as empty."""
    head = ["", f"class {name}(TypedDict, total=False):", f'    """{says}"""', ""]
    optional = {key.name: " | None" if key.type.startswith("Mapping") else "" for key in keys}
    return [*head, *(f"    {key.name}: {key.type}{optional[key.name]}" for key in keys), ""]


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
