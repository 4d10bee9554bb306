"""What a user may have meant by a reference that names no model here."""

from __future__ import annotations

import re

_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
    r"(?P<id>(?!(?:datasets|spaces|collections|papers|docs|blog)/)[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve|commit)/(?P<revision>[\w.+-]+))?(?P<more>[/?#:].*)?",
    re.IGNORECASE | re.ASCII,
)
_TAG = re.compile(r"(?P<id>[\w.-]+/[\w.-]+):(?P<tag>[\w.-]+)", re.ASCII)
_DRIVE = re.compile(r"(?P<drive>[A-Za-z]):[\\/](?P<path>.*)")


def way_out(reference: str) -> str:
    """A sentence that says what to write in its place; nothing where that is not known."""
    if page := _PAGE.fullmatch(reference):
        if (page["more"] or "").lower().endswith(".gguf"):
            return f" {gguf_way_out(page['id'])}"
        revision = f"@{page['revision']}" if page["revision"] else ""
        return f" Of a page of the hub give the id alone: {page['id']}{revision}."
    if tag := _TAG.fullmatch(reference):
        return (
            f" Nothing is fetched by a tag such as {tag['tag']}: give {tag['id']} for a "
            f"repository of safetensors. {gguf_way_out(tag['id'])}"
        )
    if drive := _DRIVE.fullmatch(reference):
        path = drive["path"].replace("\\", "/")
        return f" Under WSL that folder is /mnt/{drive['drive'].lower()}/{path}."
    return ""


def gguf_way_out(repo_id: str) -> str:
    """How a GGUF file of the hub is run, which has to be fetched by itself."""
    return (
        f"A GGUF file runs once it is here: hf download {repo_id} FILE.gguf --local-dir . and "
        "then its path as the model."
    )
