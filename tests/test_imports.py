"""The rooms of the house: who may import whom, what stays pure, and what stays without torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from programs import python

PACKAGE = Path(__file__).parent.parent / "src" / "lowtide"

# A room may import itself and the rooms after it.
FLOORS = (
    "lab",
    "extend",
    "front",
    "serve",
    "doctor",
    "model_writing",
    "record",
    "async_llm",
    "llm",
    "answers",
    "parsing",
    "engine",
    "decode",
    "models",
    "layers",
    "experts",
    "compute",
    "reading",
    "kernels",
    "memory",
    "threads",
)
FRONT_DOORS = ("cli", "__main__")
# Known to every room; they know only each other.
FACTS = {"core", "option", "params", "errors", "config", "schemas", "formats", "files"}
FACTS |= {"model_folder", "families", "plan", "buddies", "version", "registry"}
FACTS |= {"child_process", "progress"}
# Parts of two rooms: each may use itself and those before it.
ENGINE_PARTS = ("opening", "planning", "running")
CPP_PARTS = ("team", "dense", "experts", "packed", "packing", "rounded", "layer", "decisions")
# They drive policies and replay traces without a model.
BESIDE_EXPERTS = {"policies", "replay"}
# Built on the experts' interfaces; wired to them by the engine, unknown to models and layers.
ON_EXPERTS = ("devices", "hardware")
# They compute with what they are handed: no threads, no devices, no kernels of their own choice.
HANDED_COMPUTE = ("models", "layers")
NOT_FOR_THEM = ("threads", "devices", "kernels.choice", "memory.pinned_copies")
# What `policies` and the planning half of `memory` may import besides the facts.
PURE_FILES = ("policies", "lab.baselines", "lab.best_assignments", "memory.budget", "memory.pages")
PURE_FILES += ("memory.planner",)
PURE_FILES += ("memory.chunking", "memory.template", "memory.pass_planner")
PURE_LIBRARIES = {"numpy", "__future__", "abc", "bisect", "collections", "dataclasses", "enum"}
PURE_LIBRARIES |= {
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "types",
    "typing",
}
# Of the `serve` extra, and those rooms of the server that the command line uses without it.
EXTRA = {"fastapi", "starlette", "uvicorn", "h11", "pydantic", "prometheus_client", "llguidance"}
EXTRA |= {"markdown_it"}
WITHOUT_EXTRA = ("serve.settings", "serve.client_configs", "serve.context")
TORCH_FREE = FACTS | {"extend", "cli", "policies", "replay", "__main__", "__init__"}
TORCH_FREE_PARTS = ("lab.verbs", "lab.simulation", "lab.profiles", "lab.emulated.kind")
TORCH_FREE_PARTS += ("devices.kind",)
NEVER = {
    "pickle",
    "dill",
    "cloudpickle",
    "transformers",
    "diffusers",
    "accelerate",
    "safetensors",
    "gguf",
}


class Source(NamedTuple):
    """A file: its dotted name inside the package, as in `cli.main` or `llm`, and its text read."""

    name: str
    nodes: list[ast.AST]
    imports: list[str]
    imports_at_run_time: list[str]
    imports_at_load: list[str]

    @classmethod
    def of(cls, path: Path) -> Source:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        package = ".".join(("lowtide", *parts[:-1]))
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        at_run_time = list(imports(statements_at_run_time(tree), package))
        at_load = list(imports(statements_at_load(tree), package))
        nodes = list(ast.walk(tree))
        return cls(name, nodes, list(imports(nodes, package)), at_run_time, at_load)

    @property
    def room(self) -> str:
        return room(self.name)

    @property
    def own_imports(self) -> list[str]:
        return own_names(self.imports)


def room(name: str) -> str:
    """A family's model file is of the models' floor; the rest of a family is facts."""
    if name.startswith("families.") and name.endswith(".model"):
        return "models"
    return name.split(".")[0]


def imports(nodes: Iterable[ast.AST], own_package: str) -> Iterator[str]:
    """Every module that is imported, dotted."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = own_package.split(".")
                parents = package[: len(package) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield base
            # `from lowtide import hub` imports a module too.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_names(names: Iterable[str]) -> list[str]:
    """Modules of the package, without the `lowtide.`."""
    inner = (name.removeprefix("lowtide.") for name in names if "lowtide." in name)
    return [name for name in inner if is_module(name)]


def statements_at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Everything but what stands below `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements_at_run_time(child)


def statements_at_load(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run at import: not functions, not `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements_at_load(child)


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


SOURCES = [Source.of(path) for path in sorted(PACKAGE.rglob("*.py"))]


def may_import(importer: str, imported: str) -> bool:
    """Return True if a file of one room may import from another."""
    if importer == imported or importer in ("__init__", "extend"):
        return True
    if imported in FACTS:
        return True
    if importer == "families":  # when asked: see test_a_family_imports_its_model_when_asked
        return imported == "models"
    if importer in FACTS:
        return False
    if importer == "policies":
        return False
    if importer == "replay":
        return imported == "policies"
    if imported == "replay":
        return True
    if imported in ON_EXPERTS:
        return importer in ON_EXPERTS or floor_of(importer) <= FLOORS.index("decode")
    if imported in BESIDE_EXPERTS:
        return floor_of(importer) <= FLOORS.index("experts")
    return floor_of(importer) <= floor_of(imported)


def floor_of(name: str) -> int:
    if name in FRONT_DOORS:
        return FLOORS.index("front")
    if name in ON_EXPERTS:
        return FLOORS.index("experts")
    return FLOORS.index(name)


def is_pure(name: str) -> bool:
    return any(name == pure or name.startswith(pure + ".") for pure in PURE_FILES)


def libraries(names: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def dotted(node: ast.AST) -> str:
    """As in `numpy.random`; "" where it is no name of one or two parts."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_every_file_belongs_to_a_room() -> None:
    known = FACTS | BESIDE_EXPERTS | set(ON_EXPERTS) | set(FLOORS) | set(FRONT_DOORS) | {"__init__"}
    assert {source.room for source in SOURCES} <= known


def test_imports_go_one_way() -> None:
    for source in SOURCES:
        wrong = [name for name in source.own_imports if not may_import(source.room, room(name))]
        assert not wrong, f"lowtide.{source.name} must not import {wrong}"


def test_the_engine_opens_then_plans_then_runs() -> None:
    for number, part in enumerate(ENGINE_PARTS):
        later = tuple(f"engine.{name}." for name in ENGINE_PARTS[number + 1 :])
        for source in SOURCES:
            if source.name.startswith(f"engine.{part}."):
                wrong = [name for name in source.own_imports if name.startswith(later)]
                assert not wrong, f"lowtide.{source.name} must not import {wrong}"


def test_includes_of_the_compiled_kernels_go_one_way() -> None:
    folder = PACKAGE / "kernels" / "cpu"
    for path in folder.rglob("*.?pp"):
        part = path.relative_to(folder).parts[0]
        own = CPP_PARTS.index(part) if part in CPP_PARTS else -1
        for included in re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE):
            assert CPP_PARTS.index(included) <= own, f"{path.name} must not include {included}/"


def test_models_and_layers_compute_with_what_they_are_handed() -> None:
    for source in SOURCES:
        if source.room in HANDED_COMPUTE:
            wrong = [name for name in source.own_imports if name.startswith(NOT_FOR_THEM)]
            assert not wrong, f"lowtide.{source.name} is handed a Compute, and imports {wrong}"


def test_no_code_from_models_and_no_oracles() -> None:
    for source in SOURCES:
        assert not libraries(source.imports) & NEVER, source.name
        called = {dotted(node.func) for node in source.nodes if isinstance(node, ast.Call)}
        assert not called & {"eval", "exec", "__import__", "torch.load"}, source.name


def test_the_server_s_packages_are_its_own() -> None:
    for source in SOURCES:
        if source.room != "serve" or source.name.startswith(WITHOUT_EXTRA):
            assert not libraries(source.imports) & EXTRA, source.name


def unseeded(nodes: Iterable[ast.AST]) -> list[str]:
    """Randomness that does not come from a seed that was given."""
    found = {name for name in imports(nodes, "lowtide") if "numpy.random" in name}
    others = sorted(found - {"numpy.random", "numpy.random.default_rng"})
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func) == "default_rng":
            if not node.args or ast.unparse(node.args[0]) == "None":
                others.append(ast.unparse(node))
    return others


def test_decisions_are_pure() -> None:
    for source in SOURCES:
        if not is_pure(source.name):
            continue
        outside = {name for name in source.imports if not name.startswith("lowtide")}
        assert libraries(outside) <= PURE_LIBRARIES, source.name
        inside = source.own_imports
        assert all(room(name) in FACTS or is_pure(name) for name in inside), source.name
        used = set(map(dotted, source.nodes))
        assert not used & {"np.random", "numpy.random", "open", "print", "input"}, source.name
        assert not unseeded(source.nodes), f"{source.name}: what is drawn is drawn from a seed"


def test_no_torch_at_load() -> None:
    for source in SOURCES:
        if source.room in TORCH_FREE or source.name.startswith(TORCH_FREE_PARTS):
            assert "torch" not in libraries(source.imports_at_load), source.name


def test_a_family_imports_its_model_when_asked() -> None:
    for source in SOURCES:
        if source.room == "families":
            names = [name for name in source.imports_at_load if name.startswith("lowtide.")]
            assert {room(name.removeprefix("lowtide.")) for name in names} <= FACTS, source.name


def test_families_are_known_by_their_folders_alone() -> None:
    """Nothing but a family's folder names it: what else mentions one makes it no family."""
    folders = {path.parent.name for path in PACKAGE.glob("families/*/__init__.py")}
    for source in SOURCES:
        if source.name.startswith("families.") and source.name.split(".")[1] in folders:
            continue
        named = {name.split(".")[1] for name in source.own_imports if "families." in name}
        assert not named & folders, f"lowtide.{source.name} imports {named & folders}"


def test_a_refusal_does_not_wait_for_torch() -> None:
    modules = [
        f"lowtide.{source.name}".removesuffix(".__init__")
        for source in SOURCES
        if (source.room in TORCH_FREE - {"__main__"} and "template_worker" not in source.name)
        or source.name.startswith(TORCH_FREE_PARTS)
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print('torch' in sys.modules)"
    )
    result = python("-c", code, check=True)
    assert result.stdout.strip() == "False"


def test_no_circle_of_imports_at_run_time() -> None:
    modules = {source.name for source in SOURCES}
    imports_of = {
        source.name: (set(own_names(source.imports_at_run_time)) & modules) - {source.name}
        for source in SOURCES
    }
    TopologicalSorter(imports_of).prepare()  # raises CycleError, which names a circle


def test_an_installation_builds_kernels_without_any_other_package() -> None:
    """setup.py imports what compiles them, in an environment that has setuptools alone."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['numpy', 'torch', 'psutil']))"
    done = python("-c", f"{blocked}; import lowtide.kernels.cpu.library")
    assert done.returncode == 0, done.stderr
