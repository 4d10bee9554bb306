"""Shared parts of the APIs that coding agents use.

An agent stops working if a field that it always sends is refused. So unknown fields are accepted
and named in a response header, and the loaded model answers under any name. Only unsupported
fields that would change the answer's words are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, model_validator

from lowtide.params import SamplingParams
from lowtide.serve.errors import Refusal
from lowtide.serve.grammar_text import check_depth
from lowtide.serve.openai_fields import SamplingFields, check_num_fields
from lowtide.serve.service import Service

_MAX_SHOWN = 40  # names in a header
_NOT_SHOWN = re.compile(r"[^A-Za-z0-9_.:/@\[\]-]")

_UNSUPPORTED_SAMPLING: Mapping[str, object] = {
    "best_of": 1,
    "length_penalty": 1,
    "logit_bias": {},
    "min_tokens": 0,
    "mirostat": 0,
    "repeat_last_n": -1,
    "tfs_z": 1,
    "top_a": 0,
    "typical_p": 1,
    "use_beam_search": False,
}
"""Other servers' fields that would change words, with the values that change nothing."""

_UNUSED = {name for name, field in SamplingFields.model_fields.items() if field.annotation is Any}
"""Fields that are accepted and ignored."""

_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""Client's name of a thinking effort -> the chat templates' name."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""The clients' names of thinking efforts."""


class AgentBody(SamplingFields):
    """Fields of an agent's request that choose the model and how tokens are drawn."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _not_too_deep(cls, body: Any) -> Any:
        if isinstance(body, dict):
            check_num_fields(body)
            check_request_depth(body)
        return body

    def params(self, max_tokens: int | None) -> SamplingParams:
        """Return the sampling parameters. Raise Refusal or UsageError for unsupported values."""
        check_sampling(self.model_extra or {})
        if self.n > 1:
            raise Refusal("n: one answer is given to a request.", param="n", code="unsupported")
        return self.sampling(max_tokens, None)

    def ignored(self, used: Iterable[str] = ()) -> Iterator[str]:
        """Yield fields that are accepted and ignored, except those in `used`."""
        yield from sorted((self.model_fields_set & _UNUSED) - set(used))
        yield from self.model_extra or {}

    def unused_parts(self, field: str, used: Collection[str]) -> Iterator[str]:
        """Yield `field.part` for each ignored part of an object field."""
        given = getattr(self, field)
        yield from (f"{field}.{n}" for n in sorted(given) if n not in used and given[n] is not None)


def check_request_depth(body: Mapping[str, Any]) -> None:
    """Raise UsageError if the request is nested too deeply anywhere but in its tools.

    A tool's schema is checked later, by the tool's name, and only if a call must fit it.
    """
    check_depth({name: value for name, value in body.items() if name != "tools"}, "The request")


def check_sampling(fields: Mapping[str, object]) -> None:
    """Raise Refusal for an unsupported field that would change words."""
    for name, neutral in _UNSUPPORTED_SAMPLING.items():
        if fields.get(name) not in (None, neutral):
            raise Refusal(f"{name} is not supported; leave it out.", param=name, code="unsupported")


def effort_options(effort: object) -> dict[str, object]:
    """Return the chat template's variables for a thinking effort; empty if it is unknown."""
    if effort == "none":
        return {"enable_thinking": False}
    known = _EFFORTS.get(effort) if isinstance(effort, str) else None
    return {} if known is None else {"reasoning_effort": known}


def headers_of(service: Service, asked_model: str | None, ignored: Iterable[str]) -> dict[str, str]:
    """Return headers that name the ignored fields and, if another was asked for, the model."""
    headers = {}
    if asked_model != service.model_name:
        headers["x-lowtide-model"] = _shown(service.model_name)
    names = list(dict.fromkeys(map(_shown, ignored)))
    if names:
        cut = [*names[:_MAX_SHOWN], "..."] if len(names) > _MAX_SHOWN else names
        headers["x-lowtide-ignored"] = ", ".join(cut)
    return headers


def _shown(name: str) -> str:
    """Replace characters that a header cannot carry."""
    return _NOT_SHOWN.sub("-", name)[:128]
