"""docs/python.md and docs/options.md say what is so: signatures, defaults, options, code."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from programs import python

import lowtide
from lowtide import LLM, AsyncLLM, DiffusionParams, SamplingParams, plan_model

ROOT = Path(__file__).parents[1]
PYTHON = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def shown(function: Any) -> str:
    """A signature without `self` and annotations."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_every_public_name_is_told() -> None:
    missing = [name for name in lowtide.__all__ if name not in PYTHON and name != "__version__"]
    assert not missing


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_signatures_are_those_of_the_code(kind: type[Any]) -> None:
    for name in dir(kind):
        if name.startswith("_"):
            continue
        if isinstance(inspect.getattr_static(kind, name), property):
            assert f"`{name}`" in PYTHON
        else:
            assert f"`{kind.__name__}.{name}{shown(getattr(kind, name))}`" in PYTHON
    told = set(re.findall(rf"- `{kind.__name__}\.(\w+)\(", PYTHON))
    assert told <= set(dir(kind))
    assert f"`plan_model{shown(plan_model)}`" in PYTHON


def test_tables_have_every_option_with_its_default() -> None:
    options = [
        parameter
        for parameter in inspect.signature(LLM).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    for parameter in options:
        assert f"| `{parameter.name}` | `{parameter.default!r}` |" in PYTHON
    for name, parameter in inspect.signature(SamplingParams).parameters.items():
        default = "DiffusionParams()" if name == "diffusion" else repr(parameter.default)
        assert f"| `{name}` | `{default}` |" in PYTHON
    for name in inspect.signature(DiffusionParams).parameters:
        assert f"| `{name}` |" in PYTHON


def test_the_code_runs() -> None:
    """In a process of its own: some of it registers policies."""
    blocks = re.findall(r"```python\n(.*?)```", PYTHON, flags=re.DOTALL)
    assert python("-c", "\n".join(blocks), check=True).stdout


def test_what_is_made_of_the_options_is_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "options_page.py"))
    for path, made in (
        (tool["PAGE"], tool["page"]()),
        (tool["KEYWORDS"], tool["keywords"]()),
        (tool["PYTHON_PAGE"], tool["python_page"](PYTHON)),
    ):
        assert path.read_text(encoding="utf-8") == made, "run tools/options_page.py"


USER = """
from lowtide import LLM, AsyncLLM, Completion, Event, SamplingParams, plan_model

def ask(llm: LLM) -> list[Completion]:
    for event in llm.stream("x", max_tokens=3):
        text: str = event.text
    return llm.chat([{"role": "user", "content": "x"}], temperature=0.5, steps=4)

async def ask_both(llm: AsyncLLM) -> None:
    answers: list[Completion] = await llm.generate(["a", "b"], SamplingParams(n=2))
    async for event in llm.stream("x"):
        kept: Event = event

LLM("m", host_memory="1GiB", policy="lru")
plan_model("m", context=512)
LLM("m", host_memroy="1GiB")
LLM("m").generate("x", max_tokenz=3)
plan_model("m", contxt=512)
"""


@pytest.mark.slow
def test_mypy_knows_the_public_names(tmp_path: Path) -> None:
    mypy = pytest.importorskip("mypy.api")
    (tmp_path / "user.py").write_text(USER)
    assert (Path(lowtide.__file__).parent / "py.typed").exists()
    out, _, code = mypy.run(["--strict", "--no-incremental", str(tmp_path / "user.py")])
    errors = [line for line in out.splitlines() if "user.py" in line and "error" in line]
    assert code == 1 and len(errors) == 3, out
    for line, error in zip((16, 17, 18), errors, strict=True):
        assert f"user.py:{line}" in error
