"""lowtide runs mixture-of-experts language models in less memory than they have weights.

from lowtide import LLM, SamplingParams

with LLM("demo:diffusion", host_memory="16MiB") as llm:
    [completion] = llm.generate("def fib(n):", SamplingParams(max_tokens=64))
"""

from __future__ import annotations

from lowtide.errors import LowtideError

TYPE_CHECKING = False  # importing `typing` for it takes longer than this file
if TYPE_CHECKING:
    from lowtide.llm import LLM as LLM
    from lowtide.params import DiffusionParams as DiffusionParams
    from lowtide.params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "DiffusionParams", "LowtideError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """What is imported when first asked for: `LLM` brings torch with it, and the command line has
    to understand Ctrl-C before it imports anything."""
    if name == "LLM":
        from lowtide.llm import LLM

        return LLM
    if name in ("DiffusionParams", "SamplingParams"):
        from lowtide import params

        return params.__dict__[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
