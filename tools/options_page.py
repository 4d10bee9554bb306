"""Writes docs/options.md from the table of options; a test compares the two.

python tools/options_page.py
"""

from __future__ import annotations

import inspect
from pathlib import Path

from lowtide.cli.option import Group, Option
from lowtide.cli.options import OPTIONS, is_common
from lowtide.cli.verbs import OWN_VERBS

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

HEAD = """# Options

Written by `tools/options_page.py` from the table in `src/lowtide/cli/options.py`.

An option is a flag, an environment variable and a key of a TOML file that `--config` names: \
`--host-memory 12GiB`, `LOWTIDE_HOST_MEMORY=12GiB` and `host_memory = "12GiB"` say the same. \
A flag wins over the environment, that over the file, that over the default. A flag that may be \
repeated is an array or a table in a file, and JSON in a variable. `--help` shows the options in \
bold, `--help-all` all of them.
"""


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
    flag = f"**{flag}**" if is_common(option) else flag
    value = option.kind.value + (", repeatable" if option.is_repeatable else "")
    default = "" if option.default is None else f"`{str(option.default).lower()}`"
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
