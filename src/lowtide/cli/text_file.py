"""Read the text of `--text`, for calibration and scoring."""

from __future__ import annotations

from lowtide.cli.options import Settings
from lowtide.errors import StorageError, UsageError
from lowtide.files.regular_file import read_from

MAX_TEXT_BYTES = 1 << 28


def read_text(model: str, settings: Settings) -> str:
    """Read the file of `--text`; a demo model has a held-out text by default.

    Raises UsageError if there is none, or if it is too long or not UTF-8, StorageError if it cannot
    be read.
    """
    name = settings.text("text")
    if name is None:
        if not model.startswith("demo:"):
            raise UsageError("Give --text FILE, a text typical of this model's use.")
        from lowtide.model_folder.demo_tasks import held_out_text

        return held_out_text()
    try:
        with open(name, "rb") as file:
            data = read_from(file, MAX_TEXT_BYTES + 1, f"The text {name}")
    except OSError as error:
        told = f"The text {name} cannot be read: {error.strerror}"
        raise StorageError(f"{told}; give --text the path of a text in UTF-8.") from error
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(
            f"The text {name} has more than {MAX_TEXT_BYTES} bytes; give a part of it."
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"The text {name} is not in UTF-8; save it so.") from None
