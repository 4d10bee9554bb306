from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import FLASH, LAYOUTS, TINY, in_layout, ling_config, write_arrays
from hypothesis import given
from hypothesis import strategies as st
from schema_sizes import num_parameters_of, num_tensors_of

from lowtide.config import AttentionSpec, ExpertSpec, ModelConfig
from lowtide.errors import CheckpointError, UnsupportedError
from lowtide.families import read_config, read_config_in
from lowtide.formats import formats
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.schemas import ExpertTable, bind, model_schema, weight_bytes
from lowtide.schemas.weights import StoredLayer

GOLDENS = Path(__file__).parent / "goldens"
CONFIG = read_config(ling_config(**TINY))
Arrays = dict[str, np.ndarray]


def published_arrays(config: ModelConfig = CONFIG) -> Arrays:
    """Every tensor of the model, each with values of its own, in bfloat16 bits."""
    schema = model_schema(config)
    specs = list(schema.dense)
    for layer in schema.moe_layers:
        specs += schema.expert_specs(layer)
    rng = np.random.default_rng(0)
    return {s.name: rng.integers(0, 2**15, s.shape).astype(np.uint16) for s in specs}


def layer_name(layer: int, rest: str) -> str:
    return f"model.layers.{layer}.mlp.{rest}"


def write_model(folder: Path, arrays: Arrays, num_shards: int = 1) -> Checkpoint:
    if num_shards == 1:
        write_arrays(folder / "model.safetensors", arrays)
        return Checkpoint.open(folder)
    for i in range(num_shards):
        name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        shard = dict(itertools.islice(arrays.items(), i, None, num_shards))
        write_arrays(folder / name, shard)
    return Checkpoint.open(folder)


def read_parts(table: ExpertTable, checkpoint: Checkpoint, layer: int, expert: int) -> list[bytes]:
    parts = [b""] * 3
    for file, start, num_bytes, places in table.ranges(layer, expert):
        content = checkpoint.files[file].path.read_bytes()[start : start + num_bytes]
        assert len(content) == num_bytes
        for part, offset in places:
            parts[part] = content[offset : offset + table.layers[layer].part_bytes[part]]
    return parts


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("layout", [*LAYOUTS, "Mixtral"])
def test_all_layouts_give_the_same_bytes(tmp_path: Path, layout: str, num_shards: int) -> None:
    arrays = published_arrays()
    checkpoint = write_model(tmp_path, in_layout(arrays, layout), num_shards)
    weights = bind(CONFIG, checkpoint)
    stored = {each.name for layer in weights.experts.layers for each in layer.formats}
    assert stored == {"BF16"}
    assert weights.experts.largest_expert_bytes == CONFIG.moe.elements(CONFIG.hidden_size) * 2
    for row, layer in enumerate(CONFIG.moe_layers):
        for expert in range(CONFIG.moe.num_experts):
            expected = [
                arrays[layer_name(layer, f"experts.{expert}.{part}_proj.weight")].tobytes()
                for part in ("gate", "up", "down")
            ]
            assert read_parts(weights.experts, checkpoint, row, expert) == expected


def test_dense_entries(tmp_path: Path) -> None:
    arrays = published_arrays()
    arrays["model.layers.3.eh_proj.weight"] = np.zeros((2, 2), np.uint16)  # an MTP layer: ignored
    checkpoint = write_model(tmp_path, arrays)
    weights = bind(CONFIG, checkpoint)
    assert list(weights.dense) == [spec.name for spec in model_schema(CONFIG).dense]
    for name, place in weights.dense.items():
        assert place == checkpoint.tensors[name]


def test_published_order_is_one_read() -> None:
    folder = GOLDENS / "llada2-a"
    config, checkpoint = read_config_in(folder), Checkpoint.open(folder)
    weights = bind(config, checkpoint)
    for layer, expert in itertools.product(range(3), range(32)):
        [read] = weights.experts.ranges(layer, expert)
        assert read.num_bytes == weights.experts.largest_expert_bytes
        assert [part for part, _ in read.parts] == [2, 0, 1]  # down, gate, up in the file


@given(
    st.permutations(range(3)),
    st.lists(st.integers(0, 6000), min_size=3, max_size=3),
    st.lists(st.integers(0, 1), min_size=3, max_size=3),
)
def test_reads_cover_each_part_once(order: list[int], gaps: list[int], files: list[int]) -> None:
    part_bytes = (100, 200, 300)
    offsets, end = [0, 0, 0], 8
    for part, gap in zip(order, gaps, strict=True):
        offsets[part] = end + gap
        end = offsets[part] + part_bytes[part]
    layer = StoredLayer((formats()["BF16"],) * 3, part_bytes)
    table = ExpertTable((layer,), np.array([[files]]), np.array([[offsets]]))
    reads = table.ranges(0, 0)
    assert sorted(part for read in reads for part, _ in read.parts) == [0, 1, 2]
    for read in reads:
        for part, offset in read.parts:
            assert (read.file, read.start + offset) == (files[part], offsets[part])
            assert offset + part_bytes[part] <= read.num_bytes
        assert read.num_bytes <= sum(part_bytes[part] for part, _ in read.parts) + 2 * 4096
    for one, two in itertools.pairwise(reads):
        assert one.file < two.file or two.start - one.start - one.num_bytes > 4096


def test_tables_are_read_only(tmp_path: Path) -> None:
    table = bind(CONFIG, write_model(tmp_path, published_arrays())).experts
    with pytest.raises(ValueError, match="read-only"):
        table.offsets[0, 0, 0] = 1


@pytest.mark.parametrize("layout", [*LAYOUTS, "Mixtral"])
def test_every_missing_tensor_is_named(tmp_path: Path, layout: str) -> None:
    arrays = in_layout(published_arrays(), layout)
    for name in arrays:
        others = {other: array for other, array in arrays.items() if other != name}
        with pytest.raises(CheckpointError) as caught:
            bind(CONFIG, write_model(tmp_path, others))
        message = str(caught.value)
        assert f"no tensor {name}" in message or "experts of layer 1 in any known" in message


@pytest.mark.parametrize("layout", [*LAYOUTS, "Mixtral"])
def test_every_wrong_shape_is_named(tmp_path: Path, layout: str) -> None:
    arrays = in_layout(published_arrays(), layout)
    for name, array in arrays.items():
        wrong = {**arrays, name: np.zeros((*array.shape[:-1], array.shape[-1] + 1), np.uint16)}
        with pytest.raises(CheckpointError) as caught:
            bind(CONFIG, write_model(tmp_path, wrong))
        assert f"{name} has shape {list(wrong[name].shape)}" in str(caught.value)
        assert str(list(array.shape)) in str(caught.value)


def test_types_that_cannot_be_loaded(tmp_path: Path) -> None:
    arrays = published_arrays()
    norm, expert = "model.norm.weight", layer_name(1, "experts.3.up_proj.weight")
    with pytest.raises(UnsupportedError, match=f"{norm} is of type U8; supported: BF16"):
        bind(CONFIG, write_model(tmp_path, {**arrays, norm: np.zeros(8, np.uint8)}))
    with pytest.raises(UnsupportedError, match=f"{expert} is of type F32, but of another"):
        mixed = {**arrays, expert: arrays[expert].astype(np.float32)}
        bind(CONFIG, write_model(tmp_path, mixed))


def test_expert_bias_may_have_its_own_type(tmp_path: Path) -> None:
    name = layer_name(1, "gate.expert_bias")
    arrays = published_arrays() | {name: np.zeros(4, np.float32)}
    assert bind(CONFIG, write_model(tmp_path, arrays)).dense[name].dtype == "F32"


@pytest.mark.parametrize(
    ("part", "changes", "name"),
    [
        ("mixer", {"has_qk_norm": False}, "model.layers.0.attention.query_layernorm.weight"),
        ("mlp", {"has_bias": False}, "model.layers.1.mlp.gate.expert_bias"),
        ("mlp", {"shared_size": 0}, "model.layers.1.mlp.shared_experts.gate_proj.weight"),
    ],
)
def test_tensors_that_contradict_the_config(
    tmp_path: Path, part: str, changes: dict[str, object], name: str
) -> None:
    kind = ExpertSpec if part == "mlp" else AttentionSpec
    changed = {
        layer: replace(layer, **{part: replace(spec, **changes)})
        for layer in CONFIG.kinds
        if isinstance(spec := getattr(layer, part), kind)
    }
    config = replace(CONFIG, layers=tuple(changed.get(layer, layer) for layer in CONFIG.layers))
    with pytest.raises(CheckpointError, match=name):
        bind(config, write_model(tmp_path, published_arrays()))
    bind(config, write_model(tmp_path, published_arrays(config)))


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    config = replace(CONFIG, tie_word_embeddings=True)
    arrays = published_arrays(config)
    assert "lm_head.weight" not in arrays
    bind(config, write_model(tmp_path, arrays))


def test_a_config_that_claims_too_much_fails_at_once(tmp_path: Path) -> None:
    config = read_config(ling_config(**{**TINY, "num_hidden_layers": 1024, "num_experts": 4096}))
    with pytest.raises(CheckpointError, match="no tensor|has shape"):
        bind(config, write_model(tmp_path, published_arrays()))


@pytest.mark.parametrize("architecture", ["LLaDA2MoeModelLM", "BailingMoeV2ForCausalLM"])
def test_published_sizes(architecture: str) -> None:
    mini = read_config(ling_config(architectures=[architecture]))
    assert num_tensors_of(model_schema(mini)) == 14_813
    assert round(num_parameters_of(model_schema(mini)) / 1e9, 3) == 16.256
    dense, experts = weight_bytes(mini, "bfloat16")
    assert round(dense / 2**30, 2) == 1.78
    assert experts == 19 * 256 * 6 * 2**20
    assert weight_bytes(mini, "float32") == (2 * dense, 2 * experts)
    flash = read_config(ling_config(architectures=[architecture], **FLASH))
    assert num_tensors_of(model_schema(flash)) == 24_161
    assert round(num_parameters_of(model_schema(flash)) / 1e9, 2) == 102.89
    dense, experts = weight_bytes(flash, "bfloat16")
    assert (round(dense / 2**30, 2), experts) == (5.65, 186 * 2**30)
