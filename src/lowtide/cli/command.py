"""What every command shares: flags made from the option table, and how errors end it."""

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
from lowtide.cli.options import OPTIONS, Settings, resolve
from lowtide.cli.screen import printable, stderr_console
from lowtide.errors import ConfigError, LowtideError, UsageError
from lowtide.option import Group, Kind, Option

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
_python_s_warning = warnings.formatwarning


def _show_all(ctx: typer.Context, is_wanted: bool) -> None:
    """What `--help-all` does."""
    if is_wanted:
        unhide(ctx.command)
        typer.echo(ctx.get_help())
        raise typer.Exit


def unhide(verb: Any) -> None:
    """Has help and completion tell of all options, but for those that the verb only refuses."""
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
    told: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Verb], Verb]:
    """Make a command of a function: its own parameters, and a flag per option that is wanted.

    wanted: groups of options, each a panel of the help, and names of single ones, which stand
    beside the verb's own. unlisted: those that no help shows, because the verb refuses them in
    words of its own. told: what help says of an option in this verb. The function is called with
    `settings`, the options in force, in place of their flags.
    """
    options = [o for each in wanted for o in OPTIONS if each in (o.group, o.name)]

    def decorate(verb: Verb) -> Verb:
        own = inspect.signature(verb, eval_str=True).parameters.values()
        parameters = [parameter for parameter in own if parameter.name != "settings"]
        listed = [option for option in options if option.name not in unlisted]
        rare = [option for option in listed if not (option.is_common or option.name in told)]
        has_few = len(rare) <= 1  # then help has all of them
        for option in options:
            is_hidden = option not in listed or (option in rare and not has_few)
            panel = option.group.value if option.group in wanted else None
            help = told.get(option.name) or _help(option)
            parameters.append(_flag_parameter(option, help, panel, is_hidden))
        if not has_few:
            parameters.append(_HELP_ALL)

        @functools.wraps(verb)
        def command(**arguments: object) -> None:
            flags = {option.name: arguments.pop(option.name) for option in options}
            arguments.pop(_HELP_ALL.name, None)
            with errors_reported(wants_json=flags.get("json") is True):
                settings = resolve(flags, os.environ)
                with errors_reported(settings.flag("json"), settings.flag("verbose")):
                    _start_log(settings)
                    for notice in settings.notices:
                        _log.warning("%s", notice)
                    verb(settings=settings, **arguments)

        command.unlisted = unlisted  # type: ignore[attr-defined]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


@contextmanager
def errors_reported(wants_json: bool = False, is_verbose: bool = False) -> Iterator[None]:
    """End the command with one clear line and a telling exit code, never with a traceback.

    With `--json` the one object on standard output is then `{"error": {"type", "message"}}`.
    """
    try:
        yield
        sys.stdout.flush()
    except LowtideError as error:
        _tell(error, str(error), wants_json, is_verbose)
        is_usage = isinstance(error, UsageError | ConfigError)
        raise typer.Exit(EXIT_USAGE if is_usage else EXIT_FAILURE) from error
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "lowtide":
            raise
        message = (
            f"A library cannot be loaded: {error}. Where memory or open files are limited "
            "(ulimit -v, ulimit -n) raise the limit, else install lowtide again; -v shows where."
        )
        _tell(error, message, wants_json, is_verbose)
        raise typer.Exit(EXIT_FAILURE) from error
    except BrokenPipeError:
        close_stdout()
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, OSError) and is_of_stdout(error):
            raise typer.Exit(EXIT_FAILURE) from None
        if not _is_of_a_limit(error):
            raise
        _tell(error, _LIMITED.format(_first_line(error)), wants_json, is_verbose)
        raise typer.Exit(EXIT_FAILURE) from error


def is_of_stdout(error: OSError) -> bool:
    """Whether standard output is what could not be written; says so, and closes it. An error of a
    file, or of memory, is not: that should have been a typed error.
    """
    if error.filename is not None or error.errno not in _WRITE_ERRORS:
        return False
    close_stdout()
    typer.echo(f"lowtide: Standard output cannot be written: {error.strerror}.", err=True)
    return True


def _is_of_a_limit(error: Exception) -> bool:
    """Whether the system refused memory, a thread or a file: of a limit, not of lowtide."""
    if isinstance(error, OSError):
        return error.errno in _LIMITS
    return isinstance(error, MemoryError) or any(text in str(error) for text in _REFUSALS)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _tell(error: Exception, message: str, wants_json: bool, is_verbose: bool) -> None:
    if is_verbose:
        traceback.print_exception(error)
    if wants_json:
        typer.echo(json.dumps({"error": {"type": type(error).__name__, "message": message}}))
    stderr_console().print(f"lowtide: {printable(message)}")


def close_stdout() -> None:
    """Point standard output nowhere, so that the interpreter's last flush fails no more."""
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
    is_told = option.default not in (None, False)
    default = f" Default: {option.shown_default}." if is_told else ""
    return f"{option.help}{repeatable}{default}"


def _start_log(settings: Settings) -> None:
    """Send lowtide's own notices to standard error; `-v` adds what is only of interest."""
    warnings.formatwarning = _warning
    logger = logging.getLogger("lowtide")
    logger.handlers.clear()
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("lowtide: %(message)s"))
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
    """One of lowtide's own like its other notices, without a line of source. A
    library's as Python shows it.
    """
    if category is UserWarning and Path(filename).is_relative_to(_PACKAGE):
        return f"lowtide: {printable(str(message))}\n"
    return _python_s_warning(message, category, filename, lineno, line)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is now: progress bars and live views replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
