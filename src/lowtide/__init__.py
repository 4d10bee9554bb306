"""lowtide runs mixture-of-experts language models in less memory than they have weights.

from lowtide import LLM, SamplingParams

with LLM("demo:diffusion", host_memory="16MiB") as llm:
    [completion] = llm.generate("def fib(n):", SamplingParams(max_tokens=64))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.errors import LowtideError
from lowtide.params import DiffusionParams, SamplingParams

if TYPE_CHECKING:
    from lowtide.llm import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "DiffusionParams", "LowtideError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch with it, so it is imported when first asked for."""
    if name == "LLM":
        from lowtide.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
