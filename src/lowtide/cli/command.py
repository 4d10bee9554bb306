"""Shared parts of all verbs: flags made from the option table, and reporting of errors."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TextIO

import typer

from lowtide.cli import EXIT_INTERRUPTED, EXIT_USAGE
from lowtide.cli.importing import failure_text, is_own_fault
from lowtide.cli.options import FLAGS, OPTIONS, Settings, resolve
from lowtide.cli.policy_file import load_policy_file
from lowtide.cli.screen import printable, stderr_console
from lowtide.errors import ConfigError, LowtideError, StorageError, UsageError
from lowtide.option import Group, Kind, Option, in_words

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_REFUSALS = ("can't start new thread", "can't allocate memory")  # Python's and torch's
_LIMITED = (
    "The system refuses memory, a thread or a file: {}. Raise the limit (ulimit -v, -u, -n, or the "
    "container's), or lower --host-memory or --context; -v shows where."
)

EXIT_FAILURE = 1
EXIT_BROKEN_PIPE = 128 + 13

Verb = Callable[..., None]

_log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_default_formatwarning = warnings.formatwarning


def _show_all(ctx: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        unhide(ctx.command)
        typer.echo(ctx.get_help())
        raise typer.Exit


def unhide(verb: Any) -> None:
    """Show all options in help and completion, except those that the verb only refuses."""
    unlisted = getattr(verb.callback, "unlisted", ())
    for param in verb.params:
        if param.param_type_name == "option" and param.name not in unlisted:
            param.hidden = False


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--help-all", help="Show all options.", callback=_show_all, is_eager=True),
    ],
)


def takes(
    *wanted: Group | str,
    unlisted: Collection[str] = (),
    help_texts: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Verb], Verb]:
    """Turn a function into a command with a flag for each wanted option.

    The function is called with `settings`, the options in force, in place of their flags.

    wanted: groups of options, each a panel of the help, and names of single options, listed beside
    the verb's own. unlisted: options that no help shows, because the verb refuses them in words of
    its own. help_texts: help of options in this verb, in place of their usual help.
    """
    options = [o for each in wanted for o in OPTIONS if each in (o.group, o.name)]
    if any(option.name == "policy" for option in options):
        options += [option for option in OPTIONS if option.name == "policy_file"]

    def decorate(verb: Verb) -> Verb:
        own = inspect.signature(verb, eval_str=True).parameters.values()
        parameters = [parameter for parameter in own if parameter.name != "settings"]
        listed = [option for option in options if option.name not in unlisted]
        rare = [option for option in listed if not (option.is_common or option.name in help_texts)]
        has_few = len(rare) <= 1  # then help has all of them
        for option in options:
            is_hidden = option not in listed or (option in rare and not has_few)
            panel = option.group.value if option.group in wanted else None
            help = help_texts.get(option.name) or _help(option)
            parameters.append(_flag_parameter(option, help, panel, is_hidden))
        if not has_few:
            parameters.append(_HELP_ALL)

        @functools.wraps(verb)
        def command(**arguments: object) -> None:
            flags = {option.name: arguments.pop(option.name) for option in options}
            arguments.pop(_HELP_ALL.name, None)
            with errors_reported(wants_json=flags.get("json") is True):
                settings = resolve(flags, os.environ)
                words = settings.words(options)
                with errors_reported(settings.flag("json"), settings.flag("verbose"), words):
                    _start_log(settings, words)
                    _check_current_folder()
                    for notice in settings.notices:
                        _log.warning("%s", notice)
                    if (path := settings.text("policy_file")) is not None:
                        load_policy_file(Path(path))
                    verb(settings=settings, **arguments)

        command.unlisted = unlisted  # type: ignore[attr-defined]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _check_current_folder() -> None:
    """Raise StorageError in a folder that was removed.

    Relative paths lead nowhere in it, and MKL ends the process there.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise StorageError(
            f"The current folder cannot be used: {error.strerror}. It may have been removed: cd to "
            "another one."
        ) from error


@contextmanager
def errors_reported(
    wants_json: bool = False,
    is_verbose: bool = False,
    words: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """End the command with one clear line and a telling exit code; faults of ours are raised.

    With `--json` the one object on standard output is then `{"error": {"type", "message"}}`.
    `words` has what the user calls each option (`in_words`).
    """
    try:
        yield
        sys.stdout.flush()
    except LowtideError as error:
        _report(error, in_words(str(error), words), wants_json, is_verbose)
        is_usage = isinstance(error, UsageError | ConfigError)
        raise typer.Exit(EXIT_USAGE if is_usage else EXIT_FAILURE) from error
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except ImportError as error:
        if is_own_fault(error):
            raise
        message = f"{failure_text(error)}; -v shows where."
        _report(error, message, wants_json, is_verbose)
        raise typer.Exit(EXIT_FAILURE) from error
    except BrokenPipeError:
        close_stdout()
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, OSError) and report_stdout_error(error):
            raise typer.Exit(EXIT_FAILURE) from None
        if not _is_resource_limit(error):
            raise
        _report(error, _LIMITED.format(_first_line(error)), wants_json, is_verbose)
        raise typer.Exit(EXIT_FAILURE) from error


def report_stdout_error(error: OSError) -> bool:
    """Return True, report it and close standard output if `error` came from writing there.

    Errors of files or memory return False: they should have been typed errors.
    """
    if error.filename is not None or error.errno not in _WRITE_ERRORS:
        return False
    close_stdout()
    typer.echo(f"lowtide: Standard output cannot be written: {error.strerror}.", err=True)
    return True


def _is_resource_limit(error: Exception) -> bool:
    """Return True if the system refused memory, a thread or a file."""
    if isinstance(error, OSError):
        return error.errno in _LIMITS
    return isinstance(error, MemoryError) or any(text in str(error) for text in _REFUSALS)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _report(error: Exception, message: str, wants_json: bool, is_verbose: bool) -> None:
    if is_verbose:
        traceback.print_exception(error)
    if wants_json:
        typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": message}}))
    stderr_console().print(f"lowtide: {printable(message)}")


def close_stdout() -> None:
    """Redirect standard output to null, so that the interpreter's last flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flag_parameter(
    option: Option, help: str, panel: str | None, is_hidden: bool
) -> inspect.Parameter:
    names = [option.flag] if option.short is None else [option.flag, option.short]
    names.sort(key=lambda name: (not name.startswith("--"), len(name)))  # a shorter twin first
    annotation: object = str | None
    metavar: str | None = "TEXT" if option.kind is Kind.TEXTS else option.kind.value.upper()
    if option.kind is Kind.BOOLEAN:
        annotation, metavar = bool | None, None
        if option.group is not Group.OUTPUT:
            names[0] += "/--no-" + option.flag.removeprefix("--")
    elif option.is_repeatable:
        annotation = list[str] | None
    info = typer.Option(
        *names,
        help=help,
        metavar=metavar,
        rich_help_panel=panel,
        hidden=is_hidden,
        show_default=False,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation, info],
    )


def _help(option: Option) -> str:
    repeatable = " Repeatable." if option.is_repeatable else ""
    has_default = option.default not in (None, False)
    default = f" Default: {option.shown_default}." if has_default else ""
    return f"{in_words(option.help, FLAGS)}{repeatable}{default}"


def _start_log(settings: Settings, words: Mapping[str, str]) -> None:
    """Send lowtide's log to standard error; `-v` adds informational messages."""
    warnings.formatwarning = _warning
    logger = logging.getLogger("lowtide")
    logger.handlers.clear()
    handler = _StderrHandler()
    handler.setFormatter(_LogFormatter(words))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if settings.flag("verbose") else logging.WARNING)
    logger.propagate = False


def _warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format lowtide's own warnings without a line of source, and others as Python does."""
    if category is UserWarning and Path(filename).is_relative_to(_PACKAGE):
        return f"lowtide: {printable(str(message))}\n"
    return _default_formatwarning(message, category, filename, lineno, line)


class _LogFormatter(logging.Formatter):
    """Formatter of log lines, with options as the user calls them."""

    def __init__(self, words: Mapping[str, str]) -> None:
        super().__init__("lowtide: %(message)s")
        self._words = words

    def formatMessage(self, record: logging.LogRecord) -> str:
        return in_words(super().formatMessage(record), self._words)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current standard error, which progress bars and views replace."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
