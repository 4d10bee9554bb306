"""Packed experts: from blocks and scales in a file to the parts of a slot."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lowtide.core import ALIGNMENT, MoEShape
from lowtide.errors import CheckpointError, StorageError, UnsupportedError
from lowtide.experts.layout import SlotLayout
from lowtide.experts.slots import ExpertSlots
from lowtide.experts.transfer import DiskTransfer, largest_read_bytes
from lowtide.families import families, read_config
from lowtide.files.regular_file import RegularFile
from lowtide.formats import formats, mxfp4
from lowtide.formats.convert import convert, convert_rows
from lowtide.formats.plain import ITEM_BYTES, SAFETENSORS_NAME
from lowtide.kernels.operands import ClampedWeights
from lowtide.memory.arena import Arena
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_writing.safetensors_writer import OutputTensor, SafetensorsWriter
from lowtide.reading.file_reader import ArrayRead, FileReader
from lowtide.reading.finite_weights import check_finite
from lowtide.schemas import SlotTarget, TensorSpec, bind, model_schema

MXFP4 = formats()[mxfp4.NAME]
TORCH = {name: getattr(torch, torch_name) for torch_name, name in SAFETENSORS_NAME.items()}


def random_bytes(seed: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def test_every_byte_at_every_scale_is_unpacked_as_transformers_does() -> None:
    """A scale of 255 aside, which is NaN in the format and 2 ** 128 there."""
    blocks = np.tile(np.arange(256, dtype=np.uint8), 255).reshape(255, 16, 16)
    scales = np.repeat(np.arange(255, dtype=np.uint8), 16).reshape(255, 16)
    tensors = [torch.from_numpy(x)[None] for x in (blocks, scales)]
    expected = convert_moe_packed_tensors(*tensors)[0].t().contiguous()
    actual = MXFP4.unpack(blocks.reshape(-1), scales.reshape(-1)).view(np.int16)
    assert np.array_equal(actual, expected.view(torch.int16).numpy().reshape(-1))


def test_the_last_scale_is_not_a_number() -> None:
    weights = MXFP4.unpack(np.arange(16, dtype=np.uint8), np.array([255], np.uint8))
    assert torch.from_numpy(weights).view(torch.bfloat16).isnan().all()
    assert not MXFP4.is_finite(np.array([3, 255], np.uint8))
    assert MXFP4.is_finite(np.array([3, 254], np.uint8))


def test_every_byte_at_every_scale_is_kept_as_the_number_it_is() -> None:
    blocks = np.tile(np.arange(256, dtype=np.uint8), 255)
    scales = np.repeat(np.arange(255, dtype=np.uint8), 16)
    kept = MXFP4.kept
    target = np.zeros(17 * len(scales), np.uint8)
    convert([blocks, scales], MXFP4, target, kept)
    assert target.size == kept.num_bytes(32 * len(scales))
    expected = torch.from_numpy(MXFP4.unpack(blocks, scales)).view(torch.bfloat16).float()
    weights = torch.from_numpy(kept.unpack(target)).view(torch.float32)
    assert torch.equal(weights, expected)


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 3), st.sampled_from([32, 64])),
    order=st.permutations(range(3)),
    dtypes=st.tuples(st.sampled_from([mxfp4.NAME, *ITEM_BYTES]), st.sampled_from(list(ITEM_BYTES))),
    seed=st.integers(0, 10**6),
)
def test_rows_go_into_arrays_of_any_strides(
    shape: tuple[int, int, int], order: list[int], dtypes: tuple[str, str], seed: int
) -> None:
    stored_dtype, target_dtype = dtypes
    num_elements = int(np.prod(shape))
    if stored_dtype == mxfp4.NAME:
        stored, scales = random_bytes(seed, num_elements // 2), random_bytes(seed, 1 << 20)
        scales = scales[: num_elements // 32] % 40 + 107
        expected = torch.from_numpy(MXFP4.unpack(stored, scales)).view(torch.bfloat16)
    else:
        generator = torch.Generator().manual_seed(seed)
        expected = torch.randn(num_elements, generator=generator).to(TORCH[stored_dtype])
        stored, scales = expected.view(torch.uint8).numpy(), None
    pieces = [stored] if scales is None else [stored, scales]
    item_bytes = ITEM_BYTES[target_dtype]
    memory = np.zeros([shape[i] for i in order], f"u{item_bytes}")
    target = memory.transpose(np.argsort(order))
    assert target.shape == shape
    convert_rows(pieces, formats()[stored_dtype], target, formats()[target_dtype])
    bits = torch.from_numpy(np.ascontiguousarray(target).view(np.uint8).reshape(-1))
    assert torch.equal(bits.view(TORCH[target_dtype]), expected.to(TORCH[target_dtype]))


@contextmanager
def reading(path: Path, largest_bytes: int) -> Iterator[FileReader]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file system without direct reads says so
        reader = FileReader([RegularFile.at(path)], largest_bytes)
    try:
        yield reader
    finally:
        reader.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "bytes.bin"
    path.write_bytes(random_bytes(5, 200_000).tobytes())
    return path


@examples(25)
@given(
    num_rows=st.integers(1, 150),
    num_blocks=st.integers(1, 40),
    starts=st.tuples(st.integers(0, 90_000), st.integers(0, 190_000)),
    is_packed=st.booleans(),
    largest_bytes=st.sampled_from([9_000, 20_000, 300_000]),
)
def test_arrays_are_read_in_as_many_pulls_as_it_takes(
    file: Path,
    num_rows: int,
    num_blocks: int,
    starts: tuple[int, int],
    is_packed: bool,
    largest_bytes: int,
) -> None:
    content = np.fromfile(file, np.uint8)
    start, scales_start = starts
    target = np.zeros((num_rows, 32 * num_blocks), np.uint16)
    places = ((0, start), (0, scales_start)) if is_packed else ((0, start),)
    read = ArrayRead(
        places, formats()[mxfp4.NAME if is_packed else "BF16"], target, formats()["BF16"]
    )
    num_bytes, num_scales = [*read.stored_bytes(target.size), 0][:2]
    with reading(file, largest_bytes) as reader:
        ticket = reader.submit([read])
        if start + num_bytes > len(content) or scales_start + num_scales > len(content):
            with pytest.raises(StorageError, match="ends at byte 200000"):
                ticket.result()
            return
        assert ticket.result() == num_bytes + num_scales
    expected = content[start : start + num_bytes]
    if is_packed:
        expected = MXFP4.unpack(expected, content[scales_start : scales_start + num_scales])
    assert np.array_equal(target.view(np.uint8).reshape(-1), expected)


@pytest.mark.parametrize("dtype", TORCH)
def test_slots_of_clamped_experts(dtype: str) -> None:
    layout = SlotLayout.of(MoEShape(1, 1, 1, 5, 3), TORCH[dtype], ClampedWeights)
    arena = Arena(2 * layout.num_bytes)
    slots = ExpertSlots(arena, layout)
    weights = slots.weights(0, 1)
    assert isinstance(weights, ClampedWeights)
    assert [tuple(part.shape) for part in weights] == [(3, 5), (3, 5), (5, 3), (3,), (3,), (5,)]
    assert all(part.data_ptr() % ALIGNMENT == 0 for part in weights)
    for number, part in enumerate(weights):
        part.copy_(torch.arange(part.numel()).view(part.shape) + 16 * number)
        assert len(slots.part(0, 1, number)) == part.nbytes

    def in_file_order(target: SlotTarget) -> torch.Tensor:
        bits = slots.in_file_order(0, 1, target)
        flat = torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8).reshape(-1))
        return flat.view(TORCH[dtype]).view(bits.shape)

    gate, up, down, gate_bias, up_bias, down_bias = weights
    both = torch.stack([gate, up])
    rows = in_file_order(SlotTarget(0, num_parts=2))
    assert torch.equal(rows, both.transpose(0, 1))
    columns = in_file_order(SlotTarget(0, num_parts=2, is_transposed=True))
    assert torch.equal(columns, both.permute(2, 1, 0))
    assert torch.equal(in_file_order(SlotTarget(2)).squeeze(1), down)
    assert torch.equal(in_file_order(SlotTarget(2, is_transposed=True)).squeeze(2), down.t())
    biases = in_file_order(SlotTarget(3, num_parts=2)).squeeze(2)
    assert torch.equal(biases, torch.stack([gate_bias, up_bias], 1))
    assert torch.equal(in_file_order(SlotTarget(5)).flatten(), down_bias)


Arrays = dict[str, np.ndarray]

CONFIG = read_config(
    {
        **families()["gpt_oss"].sizes()["full"].config,
        "layer_types": None,
        "pad_token_id": None,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 96,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "vocab_size": 32,
        "eos_token_id": 31,
    }
)


def published_arrays() -> Arrays:
    """The bytes of every tensor of a tiny model as published, by name."""
    arrays: Arrays = {}
    for seed, spec in enumerate(tensors()):
        if spec.dtype is None:  # bfloat16, all finite
            bits = random_bytes(seed, 2 * spec.num_elements).view(np.uint16) & 0xBFFF
            arrays[spec.name] = bits.view(np.uint8)
        elif spec.name.endswith("_scales"):
            arrays[spec.name] = random_bytes(seed, spec.num_elements) % 20 + 110
        else:
            arrays[spec.name] = random_bytes(seed, spec.num_elements)
    return arrays


def write(folder: Path, arrays: Arrays, **dtypes: str) -> Checkpoint:
    outputs = [
        (OutputTensor(spec.name, dtypes.get(spec.name, spec.dtype or "BF16"), spec.shape), x.data)
        for spec in tensors()
        if (x := arrays.get(spec.name)) is not None
    ]
    with SafetensorsWriter(folder / "model.safetensors", [t for t, _ in outputs]) as writer:
        for _, data in outputs:
            writer.write(data)
    return Checkpoint.open(folder)


def tensors() -> Iterator[TensorSpec]:
    schema = model_schema(CONFIG)
    yield from schema.dense
    for layer in schema.moe_layers:
        yield from schema.expert_specs(layer)


@pytest.mark.parametrize("slot_dtype", TORCH)
def test_published_experts_arrive_in_their_slots(slot_dtype: str, tmp_path: Path) -> None:
    arrays = published_arrays()
    checkpoint = write(tmp_path, arrays)
    table = bind(CONFIG, checkpoint).experts
    dtype = TORCH[slot_dtype]
    layout = SlotLayout.of(CONFIG.moe_shape, dtype, ClampedWeights)
    slots = ExpertSlots(Arena(3 * layout.num_bytes), layout)
    with reading(checkpoint.files[0].path, largest_read_bytes(table)) as reader:
        transfer = DiskTransfer(reader, table, slots)
        num_bytes = [transfer.start(1, expert, 2 - expert).result() for expert in range(3)]
    assert num_bytes == [table.largest_expert_bytes] * 3

    for expert in range(3):
        gate, up, down, gate_bias, up_bias, down_bias = slots.weights(1, 2 - expert)
        gate_up = unpacked(arrays, "gate_up_proj", (3, 192, 2))[expert]
        assert torch.equal(gate, gate_up[0::2].to(dtype))
        assert torch.equal(up, gate_up[1::2].to(dtype))
        assert torch.equal(down, unpacked(arrays, "down_proj", (3, 64, 3))[expert].to(dtype))
        bias = biases(arrays, "gate_up_proj_bias")[expert]
        assert torch.equal(gate_bias, bias[0::2].to(dtype))
        assert torch.equal(up_bias, bias[1::2].to(dtype))
        assert torch.equal(down_bias, biases(arrays, "down_proj_bias")[expert].to(dtype))


def test_published_experts_are_kept_packed(tmp_path: Path) -> None:
    arrays = published_arrays()
    checkpoint = write(tmp_path, arrays)
    table = bind(CONFIG, checkpoint).experts
    layout = SlotLayout.of(CONFIG.moe_shape, torch.bfloat16, ClampedWeights, table.kept())
    assert [each.name for each in layout.layers[0].formats] == ["MXFP4"] * 3 + ["BF16"] * 3
    packed_bytes = [sum(part.num_bytes) for part in layout.largest.parts[:3]]
    assert sum(packed_bytes) == table.largest_expert_bytes - 2 * (2 * 96 + 64)  # its biases
    slots = ExpertSlots(Arena(layout.num_bytes), layout)
    with reading(checkpoint.files[0].path, largest_read_bytes(table)) as reader:
        DiskTransfer(reader, table, slots).start(1, 2, 0).result()
    matrices = slots.weights(1, 0)[:3]
    found = [torch.empty(each.shape, dtype=torch.bfloat16) for each in matrices]
    for matrix, out in zip(matrices, found, strict=True):
        matrix.unpack(out)
    gate_up = unpacked(arrays, "gate_up_proj", (3, 192, 2))[2]
    down = unpacked(arrays, "down_proj", (3, 64, 3))[2]
    for out, wanted in zip(found, (gate_up[0::2], gate_up[1::2], down), strict=True):
        assert torch.equal(out, wanted)


def test_a_scale_that_is_no_number_is_refused_with_its_name_where_blocks_are_kept(
    tmp_path: Path,
) -> None:
    arrays = published_arrays()
    name = "model.layers.1.mlp.experts.down_proj"
    scales = arrays[f"{name}_scales"].reshape(3, -1)
    scales[2, 5] = 255
    checkpoint = write(tmp_path, arrays)
    table = bind(CONFIG, checkpoint).experts
    layout = SlotLayout.of(CONFIG.moe_shape, torch.bfloat16, ClampedWeights, table.kept())
    slots = ExpertSlots(Arena(layout.num_bytes), layout)
    with reading(checkpoint.files[0].path, largest_read_bytes(table)) as reader:
        transfer = DiskTransfer(reader, table, slots)
        transfer.start(1, 1, 0).result()
        with pytest.raises(CheckpointError, match=f"{name}.*: a scale of its blocks is 255"):
            transfer.start(1, 2, 0).result()


def unpacked(arrays: Arrays, name: str, blocks: tuple[int, int, int]) -> torch.Tensor:
    """[experts, out, in] as transformers has them."""
    name = f"model.layers.1.mlp.experts.{name}"
    packed = torch.from_numpy(arrays[name + "_blocks"]).view(*blocks, 16)
    scales = torch.from_numpy(arrays[name + "_scales"]).view(blocks)
    return convert_moe_packed_tensors(packed, scales).transpose(1, 2)


def biases(arrays: Arrays, name: str) -> torch.Tensor:
    array = arrays[f"model.layers.1.mlp.experts.{name}"]
    return torch.from_numpy(array).view(torch.bfloat16).view(3, -1)


def test_a_missing_or_mistyped_tensor_is_named(tmp_path: Path) -> None:
    arrays = published_arrays()
    name = "model.layers.1.mlp.experts.down_proj_scales"
    with pytest.raises(UnsupportedError, match=f"{name} is of type I8; supported: U8"):
        bind(CONFIG, write(tmp_path, arrays, **{name: "I8"}))
    del arrays[name]
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        bind(CONFIG, write(tmp_path, arrays))


def test_scales_that_are_not_numbers_are_found(tmp_path: Path) -> None:
    arrays = published_arrays()
    check_finite(write(tmp_path, arrays), no_progress)
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    arrays[name][7] = 255
    with pytest.raises(CheckpointError, match=f"{name} in .* holds an infinity or NaN"):
        check_finite(write(tmp_path, arrays), no_progress)


def no_progress(what: str, done_bytes: int, total_bytes: int) -> None:
    pass
