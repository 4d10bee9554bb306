"""lowtide runs mixture-of-experts language models in less memory than they have weights.

from lowtide import LLM

with LLM("demo:autoregressive", host_memory="16MiB") as llm:
    [completion] = llm.generate("Sort 93 21 57 40 12")
"""

from __future__ import annotations

from lowtide.errors import LowtideError
from lowtide.version import __version__ as __version__

TYPE_CHECKING = False  # importing `typing` for it takes longer than this file
if TYPE_CHECKING:
    from lowtide.answers.completion import Completion as Completion
    from lowtide.answers.completion import Usage as Usage
    from lowtide.async_llm import AsyncLLM as AsyncLLM
    from lowtide.decode.request import Committed as Committed
    from lowtide.decode.request import Draft as Draft
    from lowtide.decode.request import Event as Event
    from lowtide.decode.request import Finished as Finished
    from lowtide.decode.request import Prefill as Prefill
    from lowtide.decode.request import TokenLogprobs as TokenLogprobs
    from lowtide.llm import LLM as LLM
    from lowtide.llm import plan_model as plan_model
    from lowtide.params import DiffusionParams as DiffusionParams
    from lowtide.params import SamplingParams as SamplingParams
    from lowtide.plan import MemoryPlan as MemoryPlan

_HOMES = {
    "AsyncLLM": "async_llm",
    "Committed": "decode.request",
    "Completion": "answers.completion",
    "DiffusionParams": "params",
    "Draft": "decode.request",
    "Event": "decode.request",
    "Finished": "decode.request",
    "LLM": "llm",
    "MemoryPlan": "plan",
    "Prefill": "decode.request",
    "SamplingParams": "params",
    "TokenLogprobs": "decode.request",
    "Usage": "answers.completion",
    "plan_model": "llm",
}
"""Module of each public name, imported at its first use.

`LLM` imports torch, and the command line has to handle Ctrl-C before it imports anything.
"""

__all__ = [  # noqa: F822 - those of `_HOMES`, as a test promises
    "LLM",
    "AsyncLLM",
    "Committed",
    "Completion",
    "DiffusionParams",
    "Draft",
    "Event",
    "Finished",
    "LowtideError",
    "MemoryPlan",
    "Prefill",
    "SamplingParams",
    "TokenLogprobs",
    "Usage",
    "__version__",
    "plan_model",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(f"{__name__}.{_HOMES[name]}").__dict__[name]


def __dir__() -> list[str]:
    return sorted(__all__)
