"""Layers in a call or two over quantised matrices have the bits of their operators one by one.

The matrices are in 8 or 4 bits or in ggml's packed types, with bfloat16 beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import write_ling
from gguf_oracle import small_ling
from test_few_rows import are_equal, calls_counted, check_poisoned, decoded, one_by_one, opened
from test_few_rows import compiled as compiled  # a fixture
from test_gguf_models import MIXED, SMALL, choosing, write
from whole import rows_asked

from lowtide.formats.plain import plain_format
from lowtide.kernels import choice
from lowtide.kernels.cpu.packed import MAX_FEW_ROWS
from lowtide.kernels.layer_parts import LayerParts, NormParts
from lowtide.model_writing.synth import synth

FORMATS: Mapping[str, Mapping[str, str]] = {
    "q8": {"format": "q8"},
    "q4": {"format": "q4"},
    "q8 rounded": {"format": "q8", "activations": "int8"},
    "q4 rounded": {"format": "q4", "activations": "int8"},
    "q4 experts": {"expert_dtype": "q4"},
    "q8 dense": {"dense_dtype": "q8"},
    "q8 experts, q4 dense, rounded": {
        "expert_dtype": "q8",
        "dense_dtype": "q4",
        "activations": "int8",
    },
    "file": {"activations": "own"},
    "file rounded": {"activations": "int8"},
    "file by default": {},
}

OF_FAMILY = {
    "qwen3_moe": ("q8", "q4 rounded"),
    "qwen2_moe": ("q4", "q8 rounded", "q4 experts", "q8 experts, q4 dense, rounded"),
    "bailing_moe_v2": ("q8", "q4 rounded", "q8 dense"),
    "deepseek_v2": ("q4", "q8 rounded"),
    "lfm2_moe": ("q8", "q4 rounded"),
}
"""With a shared expert weighed and not, a dense layer, a router in float32, other mixers."""

FILES = {
    "qwen3_moe": MIXED,
    "qwen2_moe": SMALL,
    "mixtral": (Type.Q4_0, Type.BF16),
    "bailing_moe_v2": (Type.Q6_K, Type.Q4_K, Type.Q8_0),
    "deepseek_v2": SMALL,
    "lfm2_moe": MIXED,
}
"""Types that a GGUF file's tensors take in turns, so that they differ within a layer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: synth(name, "tiny", base / name, seed=3) for name in OF_FAMILY}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("files")
    paths = {family: base / f"{family}.gguf" for family in FILES}
    for family, path in paths.items():
        if family == "bailing_moe_v2":
            write_ling(path, *small_ling(), choosing(FILES[family]))
        else:
            write(path, family, 0, FILES[family])
    return paths


def check(path: Path, shapes: Sequence[tuple[int, int]], **options: object) -> None:
    """Compare layers in a call with their operators one by one, in each of `shapes`.

    Once where everything is resident, and once where policies are asked. shapes: sequences, and
    rows of the first of them.
    """
    with opened(path, **options) as engine:
        with one_by_one():
            expected = [decoded(engine, *shape) for shape in shapes]
        with calls_counted() as counts:
            for shape, each in zip(shapes, expected, strict=True):
                assert are_equal(decoded(engine, *shape), each)
        of_rows = {count for index, count in enumerate(counts) if index % 4}  # not of prompts
        # Several rows of some types have each layer's experts between two calls.
        num_layers = engine.model.config.num_layers
        assert of_rows <= {1, num_layers, 2 * num_layers}
    with opened(path, 0.3, policy="lru", **options) as engine:
        for shape, each in zip(shapes, expected, strict=True):
            assert are_equal(decoded(engine, *shape), each)
        assert engine.as_dict()["num_misses"] > 0


@pytest.mark.parametrize(
    "family,name", [(family, name) for family, names in OF_FAMILY.items() for name in names]
)
def test_the_bits_of_one_by_one(folders: dict[str, Path], family: str, name: str) -> None:
    check(folders[family], ((1, 1), (3, 1), (2, 2)), **FORMATS[name])


@pytest.mark.parametrize("name", ["file", "file by default"])
@pytest.mark.parametrize("family", FILES)
def test_the_bits_of_one_by_one_from_a_file(files: dict[str, Path], family: str, name: str) -> None:
    check(files[family], ((1, 1), (3, 1), (2, 2)), **FORMATS[name])


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
def test_the_bits_of_rounded_rows_one_by_one_from_a_file(
    files: dict[str, Path], family: str
) -> None:
    check(files[family], ((1, 1), (3, 1), (2, 2)), **FORMATS["file rounded"])


@pytest.mark.parametrize(
    "name", ["q4", "q8 rounded", "q4 experts", "file", "file rounded", "file by default"]
)
def test_any_number_of_rows(folders: dict[str, Path], files: dict[str, Path], name: str) -> None:
    """The numbers reach each part's limit and go beyond it.

    A dense part in bfloat16 may take more rows than experts of few bits, and rows that are rounded
    have no limit of their own.
    """
    plain = 3 * [plain_format(torch.bfloat16)]
    most = choice.choose_kernels("auto", torch.bfloat16).several_experts(plain).max_rows
    path = files["qwen2_moe"] if name.startswith("file") else folders["qwen2_moe"]
    counts = {*range(1, 9), MAX_FEW_ROWS - 1, MAX_FEW_ROWS, MAX_FEW_ROWS + 1, most, most + 1}
    with opened(path, context=1024, **FORMATS.get(name, {})) as engine:
        for count in sorted(counts):
            with one_by_one():
                expected = decoded(engine, count, prompt=5)
            assert are_equal(decoded(engine, count, prompt=5), expected), count


@pytest.mark.parametrize("name", ["q4", "q8 rounded", "file"])
def test_no_policy_is_asked_where_everything_is_resident(
    folders: dict[str, Path],
    files: dict[str, Path],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = files["qwen3_moe"] if name == "file" else folders["qwen3_moe"]
    with opened(path, **FORMATS.get(name, {})) as engine:
        asked = rows_asked(monkeypatch)
        decoded(engine, 2, prompt=50)
        assert set(asked) == {100}  # prompts, not single rows


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("name", ["q8 rounded", "file"])
def test_nothing_is_read_that_is_not_alive(
    folders: dict[str, Path],
    files: dict[str, Path],
    name: str,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = files["qwen2_moe"] if name == "file" else folders["qwen2_moe"]
    check_poisoned(path, share, monkeypatch, **FORMATS.get(name, {}))


def test_a_layer_without_a_matrix_of_its_own(folders: dict[str, Path]) -> None:
    """Its attention and its experts computed by themselves, and no shared one."""
    kernels = choice.choose_kernels("auto", torch.bfloat16)
    with opened(folders["qwen3_moe"]) as engine:
        router = engine.model.routers[0]
        norm = torch.ones(engine.model.config.hidden_size, dtype=torch.bfloat16)
        parts = LayerParts(None, NormParts(norm, 1e-6), router.parts(), None, None)
        whole = kernels.whole_layer(parts)
        assert whole is not None and whole.max_rows > 0 and whole.max_expert_rows == 0
