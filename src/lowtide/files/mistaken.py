"""Recognise files found in place of a model's: LFS pointers, web pages, archives.

They come from a clone without its large files, a download answered by a login page or an error, or
an archive that was not unpacked. Their first bytes are none that a file of weights begins with.
"""

from __future__ import annotations

import re

HEAD_BYTES = 512
"""Number of first bytes that are looked at."""

_LFS = re.compile(rb"version https://(?:git-lfs|hawser)\.github\.com/spec/")
_LFS_SIZE = re.compile(rb"^size ([0-9]{1,18})\s*$", re.MULTILINE)
_PAGE = re.compile(rb"\s*<(?:!doctype html|html|head|body|title|script)\b", re.IGNORECASE)
_XML = re.compile(rb"\s*<(?:\?xml|Error>)")
_LETTER = re.compile(rb"[A-Za-z]")
_BEGINNINGS = {
    b"/annex/objects/": "a git-annex pointer, not the file itself; fetch it with `git annex get`",
    b"# xet version": "a Xet pointer, not the file itself; fetch the file",
    b"PK\x03\x04": "a zip archive, as PyTorch's pickled weights are; safetensors and GGUF are read",
    b"\x80\x02": "a Python pickle; safetensors and GGUF are read",
    b"\x1f\x8b": "packed with gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it",
    b"\xfd7zXZ": "packed with xz; unpack it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
}


def mistaken(start: bytes) -> str | None:
    """Describe a file that is none of a model's own, and what to do; None if it may be one.

    start: its first bytes, up to `HEAD_BYTES`.
    """
    text = start.removeprefix(b"\xef\xbb\xbf")
    if _LFS.match(text):
        size = _LFS_SIZE.search(text)
        of = f"the file of {int(size[1])} bytes" if size else "the file"
        return (
            f"a Git LFS pointer, not {of} that it stands for; run `git lfs pull` in its folder, or "
            "fetch the model with `lowtide pull`"
        )
    if _PAGE.match(text) or _XML.match(text):
        kind = "a web page" if _PAGE.match(text) else "an answer in XML"
        return f"{kind}, which a server sent in place of the file; fetch it again"
    return next((what for mark, what in _BEGINNINGS.items() if start.startswith(mark)), None)


def mistaken_weights(start: bytes) -> str | None:
    """Describe a file, as `mistaken` does, that should hold weights and no text."""
    found = mistaken(start)
    if found is not None or not start:
        return found or "empty; fetch it again"
    if start.startswith(b"GGUF"):
        return "a GGUF file under another name; end its name in .gguf"
    is_header = start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32
    if is_header:
        return "a safetensors file under another name; end its name in .safetensors"
    head = start[:64]
    if _LETTER.search(head) and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        line = head.decode().strip().splitlines()[0]
        return f"a text that begins with {line!r}, not weights; fetch it again"
    return None
