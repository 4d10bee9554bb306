"""`lowtide cache`: list or clear the KV caches of conversations stored on disk."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lowtide.cli.command import takes
from lowtide.cli.options import Settings
from lowtide.cli.report import json_line
from lowtide.cli.screen import printable, stdout_console
from lowtide.config import format_size
from lowtide.errors import StorageError, UsageError
from lowtide.option import Group

if TYPE_CHECKING:
    from lowtide.files.stored_files import StoredFile, StoredFiles

LIST, CLEAR = "list", "clear"


@takes(
    "cache_dir",
    Group.OUTPUT,
    help_texts={"cache_dir": "The folder that models are run with; it must be given."},
)
def cache(
    action: Annotated[
        str, typer.Argument(help="list, or clear: remove all of them.", metavar="list|clear")
    ] = LIST,
    *,
    settings: Settings,
) -> None:
    """List the conversations that --cache-dir keeps on disk, or clear them."""
    if action not in (LIST, CLEAR):
        raise UsageError(f"cache takes list or clear, not {action!r}.")
    folder = settings.text("cache_dir")
    if folder is None:
        raise UsageError("cache needs --cache-dir FOLDER, the one that models are run with.")
    from lowtide.files.stored_files import StoredFiles

    with closing(StoredFiles.open(Path(folder), 0, is_made=False)) as files:
        try:
            (_list if action == LIST else _clear)(files, settings)
        except OSError as error:
            told = f"{folder} cannot be used: {error.strerror}"
            raise StorageError(f"{told}; name the --cache-dir that models are run with.") from error


def _list(files: StoredFiles, settings: Settings) -> None:
    listed = sorted(files.listed(), key=lambda stored: -stored.entry.used_ns)
    total = sum(stored.entry.num_bytes for stored in listed)
    rows = [_row(stored) for stored in listed]
    if settings.flag("json"):
        print(json_line({"files": rows, "bytes": total}))
        return
    table = Table()
    for column in ("model", "tokens", "size", "last used", "file"):
        table.add_column(column, justify="right" if column in ("tokens", "size") else "left")
    for row in rows:
        size, used = format_size(row["bytes"]), row["last_used"].replace("T", " ")
        model = "(cannot be used)" if row["model"] is None else printable(row["model"])
        table.add_row(model, str(row["tokens"] or ""), size, used, row["file"])
    stdout_console().print(table)
    print(f"{len(rows)} conversations, {format_size(total)} in {files.folder.path}")


def _row(stored: StoredFile) -> dict[str, Any]:
    entry, head = stored
    used = datetime.fromtimestamp(entry.used_ns / 1e9)
    return {
        "model": None if head is None else head.name,
        "tokens": None if head is None else len(head.tokens),
        "bytes": entry.num_bytes,
        "last_used": used.isoformat(timespec="minutes"),
        "file": entry.name,
    }


def _clear(files: StoredFiles, settings: Settings) -> None:
    removed = files.clear()
    num_bytes = sum(entry.num_bytes for entry in removed)
    if settings.flag("json"):
        print(json_line({"removed": len(removed), "bytes": num_bytes}))
    else:
        print(f"removed {len(removed)} files ({format_size(num_bytes)})")
