"""Writes the manual page and the shells' completions, in share/: `make man`.

All of it is made of the verbs (`cli/verbs.py`) and the declared options; a test compares them. A
wheel installs them under the environment's share/, where `man` and shells look.

    python tools/man_page.py
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from lowtide.cli.command import unhide
from lowtide.cli.options import FLAGS, OPTIONS
from lowtide.cli.verbs import OWN_VERBS
from lowtide.option import Group, Kind, Option, in_words
from lowtide.version import __version__

_SHARE = Path(__file__).parents[1] / "share"

_DECLARED = {option.name: option for option in OPTIONS}
_DEMOS = ("demo:autoregressive", "demo:diffusion")
_VALUES = {
    Kind.PATH: "FILE",
    Kind.INTEGER: "N",
    Kind.NUMBER: "NUMBER",
    Kind.CACHE: "MODE",
    Kind.SIZE: "SIZE",
    Kind.CORES: "CORES",
    Kind.PAIRS: "NAME=VALUE",
    Kind.JSON_PAIRS: "NAME=JSON",
}
_EXIT_CODES = {
    0: "success",
    1: "failure",
    2: "wrong usage",
    129: "SIGHUP: the terminal was closed",
    130: "Ctrl-C",
    141: "the reader of the output has gone",
    143: "SIGTERM",
}


class Flag(NamedTuple):
    """Flag of a verb: its names, its help, and what completes its value."""

    name: str
    names: tuple[str, ...]  # with a short one and a --no- one
    help: str
    takes_value: bool
    choices: tuple[str, ...]


class VerbPage(NamedTuple):
    """Verb with all that its help shows."""

    name: str
    line: str
    usage: str  # arguments, as "MODEL [TEXT]..."
    flags: tuple[Flag, ...]


def files() -> dict[Path, str]:
    """All files, by their paths."""
    verbs = list(_verbs())
    return {
        _SHARE / "man/man1/lowtide.1": manual(verbs),
        _SHARE / "bash-completion/completions/lowtide": bash(verbs),
        _SHARE / "zsh/site-functions/_lowtide": zsh(verbs),
        _SHARE / "fish/vendor_completions.d/lowtide.fish": fish(verbs),
    }


def _verbs() -> Iterator[VerbPage]:
    for name, entry in OWN_VERBS.items():
        if not entry.line:
            continue
        one = typer.Typer(add_completion=False)
        one.command(name)(entry.load())
        command: Any = typer.main.get_command(one)
        unhide(command)
        pieces = command.collect_usage_pieces(command.context_class(command, info_name=name))
        usage = " ".join(piece for piece in pieces if piece != "[OPTIONS]")
        flags = [
            _flag(param)
            for param in command.params
            if param.param_type_name == "option" and not param.hidden
        ]
        yield VerbPage(name, entry.line, usage, (*flags, _HELP))


_HELP = Flag("help", ("--help",), "Show the most used options.", False, ())


def _flag(param: Any) -> Flag:
    names = (*sorted(param.opts, key=len, reverse=True), *param.secondary_opts)
    choices = _DECLARED[param.name].choices if param.name in _DECLARED else ()
    return Flag(param.name, names, param.help or "", not param.is_flag, choices)


# The manual


def manual(verbs: list[VerbPage]) -> str:
    """The manual page, in man's macros."""
    lines = [
        '.\\" Written by tools/man_page.py.',
        f'.TH LOWTIDE 1 "" "lowtide {__version__}" "User Commands"',
        ".SH NAME",
        "lowtide \\- run mixture\\-of\\-experts language models that are larger than memory",
        ".SH SYNOPSIS",
        ".B lowtide",
        "\\fIVERB\\fR [\\fIOPTIONS\\fR] [\\fIARGUMENTS\\fR]",
        ".SH DESCRIPTION",
        "A memory budget is set; experts that do not fit are read from disk when they are needed.",
        "The budget affects speed, never the output.",
        ".SH VERBS",
        *(line for verb in verbs for line in _verb_lines(verb)),
        ".SH OPTIONS",
        "Sizes are 12GiB, 12GB, 80% of what the machine has, bytes, or auto.",
        *(line for group in Group for line in _group_lines(group, verbs)),
        ".SH ENVIRONMENT",
        "Every option is a variable, too: \\-\\-host\\-memory is LOWTIDE_HOST_MEMORY. A flag wins",
        "over the environment, that over the file that \\-\\-config names, that over the default.",
        ".TP",
        ".B XDG_CACHE_HOME",
        "Folder of compiled kernels and of what was measured; by default ~/.cache.",
        ".TP",
        ".B HF_HOME",
        "Folder of models from the hub.",
        ".SH EXIT STATUS",
    ]
    for code, meaning in _EXIT_CODES.items():
        lines += [".TP", f".B {code}", _escaped(meaning)]
    return "\n".join([*lines, ""])


def _verb_lines(verb: VerbPage) -> list[str]:
    own = [flag for flag in verb.flags if flag.name not in _DECLARED and flag is not _HELP]
    lines = [
        ".TP",
        f".B lowtide {verb.name}" + (f" \\fR{_escaped(verb.usage)}" if verb.usage else ""),
        _escaped(verb.line),
    ]
    for flag in own:
        if flag.name != "help_all":
            names = ", ".join(f"\\fB{_escaped(name)}\\fR" for name in flag.names)
            lines += [".br", f"{names}: {_escaped(flag.help)}"]
    example = OWN_VERBS[verb.name].example
    return [*lines, ".br", f"For example: {_escaped(example)}"] if example else lines


def _group_lines(group: Group, verbs: list[VerbPage]) -> list[str]:
    lines = []
    for option in OPTIONS:
        of = [verb for verb in verbs if any(flag.name == option.name for flag in verb.flags)]
        if option.group is group and of:
            lines += _option_lines(option, of)
    return [f".SS {group.value}", *lines] if lines else []


def _option_lines(option: Option, verbs: list[VerbPage]) -> list[str]:
    [flag] = [flag for flag in verbs[0].flags if flag.name == option.name]
    names = ", ".join(f"\\fB{_escaped(name)}\\fR" for name in flag.names)
    value = "|".join(option.choices) or _VALUES.get(option.kind, "TEXT")
    shown = f"{names} \\fI{_escaped(value)}\\fR" if flag.takes_value else names
    more = "" if option.default in (None, False) else f" Default: {option.shown_default}."
    again = " May be repeated." if option.is_repeatable else ""
    of = ", ".join(verb.name for verb in verbs)
    return [
        ".TP",
        shown,
        _escaped(in_words(option.help, FLAGS) + more + again),
        ".br",
        f"Of {_escaped(of)}.",
    ]


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")
    return f"\\&{text}" if text.startswith((".", "'")) else text


# Completions


def bash(verbs: list[VerbPage]) -> str:
    """Completion for bash."""
    names = " ".join(verb.name for verb in verbs)
    values = [
        f"        {'|'.join(names)}) values={shlex.quote(' '.join(choices))} ;;"
        for names, choices in _choices(verbs).items()
    ]
    of_verbs = [
        f"        {verb.name}) flags={shlex.quote(' '.join(_long_names(verb)))} ;;"
        for verb in verbs
    ]
    return "\n".join(
        [
            "# Completion of lowtide for bash; written by tools/man_page.py.",
            "_lowtide() {",
            "    local word=${COMP_WORDS[COMP_CWORD]} flags='' values=''",
            "    COMPREPLY=()",
            "    if ((COMP_CWORD == 1)); then",
            f"        mapfile -t COMPREPLY < <(compgen -W '{names}' -- \"$word\")",
            "        return",
            "    fi",
            "    case ${COMP_WORDS[COMP_CWORD - 1]} in",
            *values,
            "    esac",
            "    case ${COMP_WORDS[1]} in",
            *of_verbs,
            "    esac",
            "    if [[ $values ]]; then",
            '        mapfile -t COMPREPLY < <(compgen -W "$values" -- "$word")',
            "    elif [[ $word == -* ]]; then",
            '        mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$word")',
            "    fi",
            "}",
            "complete -o default -F _lowtide lowtide",
            "",
        ]
    )


def zsh(verbs: list[VerbPage]) -> str:
    """Completion for zsh."""
    listed = [f"        {shlex.quote(f'{verb.name}:{verb.line}')}" for verb in verbs]
    cases = []
    for verb in verbs:
        cases.append(f"        {verb.name}) _arguments \\")
        for flag in verb.flags:
            cases += [f"            {shlex.quote(spec)} \\" for spec in _zsh_specs(flag)]
        cases.append("            '*:argument:_lowtide_models' ;;")
    return "\n".join(
        [
            "#compdef lowtide",
            "# Completion of lowtide for zsh; written by tools/man_page.py.",
            "_lowtide_models() {",
            f"    compadd -- {' '.join(_DEMOS)}",
            "    _files",
            "}",
            "_lowtide() {",
            "    local -a verbs",
            "    verbs=(",
            *listed,
            "    )",
            "    if ((CURRENT == 2)); then",
            "        _describe verb verbs",
            "        return",
            "    fi",
            "    local verb=$words[2]",
            "    shift words",
            "    ((CURRENT--))",
            "    case $verb in",
            *cases,
            "    esac",
            "}",
            '_lowtide "$@"',
            "",
        ]
    )


def _zsh_specs(flag: Flag) -> list[str]:
    told = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in flag.help)
    value = ""
    if flag.takes_value:
        value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"
    return [f"*{name}[{told}]{value}" for name in flag.names]


def fish(verbs: list[VerbPage]) -> str:
    """Completion for fish."""
    lines = ["# Completion of lowtide for fish; written by tools/man_page.py."]
    for verb in verbs:
        told = f"-a {verb.name} -d {_fish_quoted(verb.line)}"
        lines.append(f"complete -c lowtide -n __fish_use_subcommand -f {told}")
    for verb in verbs:
        seen = f"complete -c lowtide -n '__fish_seen_subcommand_from {verb.name}'"
        if "MODEL" in verb.usage:
            lines.append(f"{seen} -a '{' '.join(_DEMOS)}'")
        lines += [f"{seen} {_fish_words(flag)}" for flag in verb.flags]
    return "\n".join([*lines, ""])


def _fish_words(flag: Flag) -> str:
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
    )
    words = [names, f"-d {_fish_quoted(flag.help)}"]
    if flag.takes_value:
        words.append(f"-x -a '{' '.join(flag.choices)}'" if flag.choices else "-r")
    return " ".join(words)


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _choices(verbs: list[VerbPage]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Known values of flags, by the flags' names."""
    return {flag.names: flag.choices for verb in verbs for flag in verb.flags if flag.choices}


def _long_names(verb: VerbPage) -> list[str]:
    return [name for flag in verb.flags for name in flag.names if name.startswith("--")]


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
