"""Parse references to models of the hub: ids, page addresses and GGUF tags.

parse("org/name"), parse("org/name@revision"), parse("org/name:Q4_K_M")
parse("https://huggingface.co/org/name/blob/main/name-Q4_K_M.gguf")
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from lowtide.errors import UsageError

DEFAULT_REVISION = "main"

_ID = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
_REVISION = re.compile(r"[A-Za-z0-9][\w./+-]{0,199}")
_NAME = re.compile(
    rf"(?P<id>{_ID})(?:@(?P<revision>[^:]*))?(?::(?P<tag>[\w./-]{{1,200}}))?", re.ASCII
)
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
    r"(?!(?:datasets|spaces|collections|papers|docs|blog)/)(?P<name>[^?#]+?)/?(?:[?#].*)?",
    re.IGNORECASE,
)
_FILE = re.compile(
    rf"(?P<id>{_ID})/(?:tree|blob|resolve|commit)/(?P<revision>[^/]+)(?:/(?P<file>.+))?", re.ASCII
)


class HubReference(NamedTuple):
    """A reference to a model of the hub."""

    repo_id: str
    revision: str = DEFAULT_REVISION
    tag: str | None = None  # which GGUF model of several: a quantisation such as Q4_K_M, or a file

    @property
    def name(self) -> str:
        tag = "" if self.tag is None else f":{self.tag}"
        return f"{self.repo_id}@{self.revision}{tag}"


def parse(reference: str) -> HubReference | None:
    """Parse a reference; return None if it names nothing on the hub.

    Raises UsageError for an id with an invalid revision.
    """
    if page := _PAGE.fullmatch(reference):
        reference = unquote(page["name"])
        if found := _FILE.fullmatch(reference):
            is_gguf = (found["file"] or "").lower().endswith(".gguf")
            tag = found["file"] if is_gguf else None
            return HubReference(found["id"], _checked(found["revision"]), tag)
    found = _NAME.fullmatch(reference)
    if found is None:
        return None
    revision = found["revision"]
    return HubReference(
        found["id"], DEFAULT_REVISION if revision is None else _checked(revision), found["tag"]
    )


def _checked(revision: str) -> str:
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise UsageError(f"{revision!r} is not a revision; give a branch, a tag or a commit.")
    return revision
