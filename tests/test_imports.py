"""The rooms of the house: who may import whom, what stays pure, and what stays without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "lowtide"

# A room may import itself and the rooms after it.
FLOORS = (
    "front",
    "lab",
    "async_llm",
    "llm",
    "answers",
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
FRONT_DOORS = ("cli", "serve", "__main__")
# Known to every room; they know only each other.
FACTS = {"core", "params", "errors", "config", "schemas", "formats", "files", "model_folder"}
FACTS |= {"families", "plan", "profiles", "buddies", "version"}
# They drive policies and replay traces without a model.
BESIDE_EXPERTS = {"policies", "replay"}
# Built on the experts' interfaces; wired to them by the engine, unknown to models and layers.
ON_EXPERTS = ("devices", "hardware")
# They compute with what they are handed: no threads, no devices, no kernels of their own choice.
HANDED_COMPUTE = ("models", "layers")
NOT_FOR_THEM = ("threads", "devices", "kernels.choice", "memory.pinned_copies")
# What `policies` and the planning half of `memory` may import besides the facts.
PURE_FILES = ("policies", "memory.budget", "memory.pages", "memory.planner")
PURE_FILES += ("memory.chunking", "memory.template", "memory.pass_planner")
PURE_LIBRARIES = {"numpy", "__future__", "abc", "bisect", "collections", "dataclasses", "enum"}
PURE_LIBRARIES |= {"functools", "heapq", "itertools", "math", "operator", "types", "typing"}
TORCH_FREE = FACTS | {"cli", "policies", "replay", "__main__", "__init__"}
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

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Dotted name inside the package: `cli.main`, `policies`, `llm`, `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def room(name: str) -> str:
    """A family's model file is of the models' floor; the rest of a family is facts."""
    if name.startswith("families.") and name.endswith(".model"):
        return "models"
    return name.split(".")[0]


def imports(
    tree: ast.AST, own_package: str, only_at_load: bool = False
) -> Iterator[tuple[str, ast.AST]]:
    """Every module imported, dotted; nested ones too, unless `only_at_load`."""
    for node in at_load(tree) if only_at_load else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = own_package.split(".")
                parents = package[: len(package) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield base, node
            # `from lowtide import hub` imports a module too.
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)


def at_load(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that run when a module is imported: not functions, not `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_load(child)


def own_imports(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, without the `lowtide.`."""
    for name, _ in imports(parse(path), package_of(path)):
        inner = name.removeprefix("lowtide.")
        if name.startswith("lowtide.") and is_module(inner):
            yield inner


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def package_of(path: Path) -> str:
    return ".".join(("lowtide", *path.relative_to(PACKAGE).parent.parts))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def may_import(importer: str, imported: str) -> bool:
    """Whether a file of one room may import from another."""
    if importer == imported or importer == "__init__":
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


def test_every_file_belongs_to_a_room() -> None:
    known = FACTS | BESIDE_EXPERTS | set(ON_EXPERTS) | set(FLOORS) | set(FRONT_DOORS) | {"__init__"}
    assert {room(module_name(path)) for path in FILES} <= known


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    importer = room(module_name(path))
    wrong = [name for name in own_imports(path) if not may_import(importer, room(name))]
    assert not wrong, f"lowtide.{module_name(path)} must not import {wrong}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(module_name(p)) in HANDED_COMPUTE], ids=module_name
)
def test_models_and_layers_compute_with_what_they_are_handed(path: Path) -> None:
    wrong = [name for name in own_imports(path) if name.startswith(NOT_FOR_THEM)]
    assert not wrong, f"lowtide.{module_name(path)} is handed a Compute, and imports {wrong}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_code_from_models_and_no_oracles(path: Path) -> None:
    tree = parse(path)
    libraries = {name.split(".")[0] for name, _ in imports(tree, package_of(path))}
    assert not libraries & NEVER
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {func.id for func in calls if isinstance(func, ast.Name)}
    assert not called & {"eval", "exec", "__import__"}
    assert not any(ast.unparse(func) == "torch.load" for func in calls)


def unseeded(tree: ast.AST, own_package: str) -> list[str]:
    """Randomness that does not come from a seed that was given."""
    found = {name for name, _ in imports(tree, own_package) if name.startswith("numpy.random")}
    others = sorted(found - {"numpy.random", "numpy.random.default_rng"})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "default_rng":
            if not node.args or ast.unparse(node.args[0]) == "None":
                others.append(ast.unparse(node))
    return others


@pytest.mark.parametrize("path", [p for p in FILES if is_pure(module_name(p))], ids=module_name)
def test_decisions_are_pure(path: Path) -> None:
    tree = parse(path)
    found = [name for name, _ in imports(tree, package_of(path))]
    outside = {name.split(".")[0] for name in found if not name.startswith("lowtide")}
    assert outside <= PURE_LIBRARIES
    inside = list(own_imports(path))
    assert all(room(name) in FACTS or is_pure(name) for name in inside), inside
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & {"np.random", "numpy.random"}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"open", "print", "input"}
    assert not unseeded(tree, package_of(path)), "what is drawn is drawn from a seed"


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(module_name(p)) in TORCH_FREE], ids=module_name
)
def test_no_torch_at_load(path: Path) -> None:
    found = imports(parse(path), package_of(path), only_at_load=True)
    assert "torch" not in {name.split(".")[0] for name, _ in found}


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(module_name(p)) == "families"], ids=module_name
)
def test_a_family_imports_its_model_when_asked(path: Path) -> None:
    found = [name for name, _ in imports(parse(path), package_of(path), only_at_load=True)]
    rooms = {room(name.removeprefix("lowtide.")) for name in found if name.startswith("lowtide.")}
    assert rooms <= FACTS


def test_families_are_known_by_their_folders_alone() -> None:
    """Nothing but a family's folder names it: what else mentions one makes it no family."""
    folders = {path.parent.name for path in PACKAGE.glob("families/*/__init__.py")}
    for path in FILES:
        name = module_name(path)
        if name.startswith("families.") and name.split(".")[1] in folders:
            continue
        named = {
            imported.split(".")[1] for imported in own_imports(path) if "families." in imported
        }
        assert not named & folders, f"lowtide.{name} imports {named & folders}"


def test_a_refusal_does_not_wait_for_torch() -> None:
    modules = [
        "lowtide." + module_name(path) if module_name(path) != "__init__" else "lowtide"
        for path in FILES
        if room(module_name(path)) in TORCH_FREE - {"__main__"}
        and "template_worker" not in path.parts[-1]
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "False"


def test_the_rules_themselves() -> None:
    assert may_import("cli", "llm") and not may_import("llm", "cli")
    assert may_import("experts", "policies") and not may_import("policies", "experts")
    assert may_import("hardware", "experts") and not may_import("experts", "hardware")
    assert may_import("kernels", "memory") and not may_import("memory", "kernels")
    assert may_import("experts", "compute") and not may_import("compute", "experts")
    assert not may_import("config", "llm")
    assert may_import("engine", "devices") and not may_import("models", "devices")
    assert not may_import("config", "models") and not may_import("families", "layers")
    assert room("families.mixtral.model") == "models" and room("families.sizes") == "families"
    assert not may_import("experts", "devices") and not may_import("layers", "devices")
    tree = ast.parse("from .. import llm\nfrom ..experts.slots import SlotLedger")
    names = [name for name, _ in imports(tree, "lowtide.cli")]
    assert "lowtide.llm" in names and "lowtide.experts.slots" in names
    drawn = "from numpy.random import default_rng\n"
    assert not unseeded(ast.parse(drawn + "default_rng(seed)"), "lowtide.policies")
    for text in ("default_rng()", "default_rng(None)", "from numpy.random import normal"):
        assert unseeded(ast.parse(drawn + text), "lowtide.policies")
