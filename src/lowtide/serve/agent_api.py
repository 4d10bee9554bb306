"""What the APIs of coding agents share.

An agent whose request is refused for a field that it always sends does nothing at all. So fields
that are not known are taken and named in a header of the answer, and the loaded model answers under
whatever name it is asked by. Only what would change words without being supported is refused.
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
"""Fields that other servers have and that would change words, with the values that change none."""

_UNUSED = {name for name, field in SamplingFields.model_fields.items() if field.annotation is Any}
_UNUSED |= {"return_progress", "return_token_ids", "stream_options"}
"""Fields of `SamplingFields` that no token of an agent's answer depends on."""

_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""What chat templates call them."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model is to think: what clients call it."""


class AgentBody(SamplingFields):
    """The fields of an agent's request that say which model answers and how it draws tokens."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _not_too_deep(cls, body: Any) -> Any:
        if isinstance(body, dict):
            check_num_fields(body)
            check_request_depth(body)
        return body

    def params(self, max_tokens: int | None) -> SamplingParams:
        """What is asked of the tokens. Raises Refusal or UsageError for what cannot be."""
        check_sampling(self.model_extra or {})
        if self.n > 1:
            raise Refusal("n: one answer is given to a request.", param="n", code="unsupported")
        return self.sampling(max_tokens, None)

    def ignored(self, used: Iterable[str] = ()) -> Iterator[str]:
        """Fields that are taken and not used, but for those that this API uses."""
        yield from sorted((self.model_fields_set & _UNUSED) - set(used))
        yield from self.model_extra or {}

    def unused_parts(self, field: str, used: Collection[str]) -> Iterator[str]:
        """The same of parts of a field that is an object."""
        given = getattr(self, field)
        yield from (f"{field}.{n}" for n in sorted(given) if n not in used and given[n] is not None)


def check_request_depth(body: Mapping[str, Any]) -> None:
    """Raise UsageError for a request that is nested too deeply, apart from its tools.

    A schema need not be kept to where no call must be made; where one must, it is refused by the
    name of its tool.
    """
    check_depth({name: value for name, value in body.items() if name != "tools"}, "The request")


def check_sampling(fields: Mapping[str, object]) -> None:
    """Raises Refusal for a field that would change words and is not supported."""
    for name, neutral in _UNSUPPORTED_SAMPLING.items():
        if fields.get(name) not in (None, neutral):
            raise Refusal(f"{name} is not supported; leave it out.", param=name, code="unsupported")


def effort_options(effort: object) -> dict[str, object]:
    """Return the variables of chat templates for a thinking effort; none for an unknown effort."""
    if effort == "none":
        return {"enable_thinking": False}
    known = _EFFORTS.get(effort) if isinstance(effort, str) else None
    return {} if known is None else {"reasoning_effort": known}


def headers_of(service: Service, asked_model: str | None, ignored: Iterable[str]) -> dict[str, str]:
    """Return headers that name the answering model and the ignored fields.

    The model is named where another one was asked for.
    """
    headers = {}
    if asked_model != service.model_name:
        headers["x-lowtide-model"] = _shown(service.model_name)
    names = list(dict.fromkeys(map(_shown, ignored)))
    if names:
        cut = [*names[:_MAX_SHOWN], "..."] if len(names) > _MAX_SHOWN else names
        headers["x-lowtide-ignored"] = ", ".join(cut)
    return headers


def _shown(name: str) -> str:
    """A name as a header may carry it, whatever a request calls its field."""
    return _NOT_SHOWN.sub("-", name)[:128]
