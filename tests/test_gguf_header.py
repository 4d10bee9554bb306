"""Headers of GGUF files: read as the `gguf` package reads them, and believed in nothing."""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import finish, random_blocks

from lowtide.errors import CheckpointError, LowtideError, UnsupportedError
from lowtide.model_folder.gguf_file import first_gguf
from lowtide.model_folder.gguf_header import GgufArray, GgufHeader

WORDS = ["<s>", "Ġthe", "日本", "", "x" * 300]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a value of every kind and tensors of several types."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, value in (("uint8", 200), ("int8", -3), ("uint16", 60000), ("int16", -300)):
        getattr(writer, f"add_{name}")(f"of.{name}", value)
    writer.add_uint32("qwen3moe.block_count", 2)
    writer.add_int32("of.int32", -5)
    writer.add_uint64("of.uint64", 2**40)
    writer.add_int64("of.int64", -(2**40))
    writer.add_float32("of.float32", 1e-6)
    writer.add_float64("of.float64", 0.1)
    writer.add_bool("of.bool", True)
    writer.add_token_list(WORDS)
    writer.add_token_scores([0.5, -1.0, 2.0, 0.0, 1.0])
    writer.add_array("of.numbers", [3, 1, 2])
    for number, kind in enumerate((Type.Q4_K, Type.Q8_0, Type.F16)):
        data = (
            np.ones((3, 256), np.float16)
            if kind is Type.F16
            else random_blocks((2, 3, 256), kind, number)
        )
        writer.add_tensor(f"blk.{number}.ffn_up_exps.weight", data, raw_dtype=kind)
    finish(writer)
    return path


def test_a_header_is_what_the_package_reads(path: Path) -> None:
    header, expected = GgufHeader.read(path), gguf.GGUFReader(path)
    names = [tensor.name for tensor in expected.tensors]
    assert list(header.tensors) == names
    for tensor in expected.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert (ours.offset, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.format.name == tensor.tensor_type.name
    for key, field in expected.fields.items():
        if key.startswith("GGUF."):
            continue
        ours, theirs = header.metadata[key], field.contents()
        if isinstance(ours, GgufArray):
            is_text = isinstance(theirs[0], str)
            assert list(ours.strings() if is_text else ours.numbers()) == theirs
        elif isinstance(ours, float) and key != "of.float64":
            assert ours == 1e-6 and np.float32(ours) == theirs  # the decimal that was meant
        else:
            assert ours == theirs


def changed(path: Path, target: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(path.read_bytes())
    change(data)
    target.write_bytes(data)
    return target


def test_mutations_are_read_or_refused(path: Path, tmp_path: Path) -> None:
    """A thousand: bytes changed, counts that lie, files cut short. Nothing else ever happens."""
    rng = random.Random(7)
    data = path.read_bytes()
    header_bytes = min(t.offset for t in GgufHeader.read(path).tensors.values())
    target, refused, num_calls = tmp_path / "mutated.gguf", 0, 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    tracemalloc.start()
    for number in range(1000):
        mutated = bytearray(data)
        if number % 4 == 0:  # lies about lengths, counts, offsets
            at = rng.randrange(8, header_bytes - 8)
            lie = rng.choice([2**63, 2**64 - 1, 2**32, 2**31, 10**9, len(data), 0, 1])
            mutated[at : at + 8] = struct.pack("<Q", lie)
        elif number % 4 == 1:
            del mutated[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randint(1, 8)):
                mutated[rng.randrange(header_bytes)] = rng.randrange(256)
        target.write_bytes(mutated)
        sys.setprofile(count)
        try:
            header = GgufHeader.read(target)
        except (CheckpointError, UnsupportedError) as error:
            assert str(target) in str(error)
            refused += 1
            continue
        finally:
            sys.setprofile(None)
        for value in header.metadata.values():
            if isinstance(value, GgufArray):
                list(value.strings() if value.kind == 8 else value.numbers())
        for tensor in header.tensors.values():
            assert 0 < tensor.offset + tensor.num_bytes <= len(mutated)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 500
    assert peak_bytes < 64 << 20
    assert num_calls < 1000 * header_bytes


def put(at: int, code: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(code, data, at, value)


@pytest.mark.parametrize(
    "change,error,match",
    [
        (put(0, "<I", 0), CheckpointError, "not a GGUF file: it begins with"),
        (put(4, "<I", 1), UnsupportedError, "version 1; little-endian ones of version 2 and 3"),
        (put(4, "<I", 0x03000000), UnsupportedError, "of a big-endian machine"),
        (put(8, "<Q", 2**40), CheckpointError, r"announces 1099511627776 tensors in \d+ bytes"),
        (put(16, "<Q", 2**63), CheckpointError, "announces 9223372036854775808 keys"),
        (put(24, "<Q", 2**50), CheckpointError, "a key of 1125899906842624 bytes; at most 65535"),
        (lambda data: data.__delitem__(slice(-1, None)), CheckpointError, "ends at byte"),
        (lambda data: data.__delitem__(slice(20, None)), CheckpointError, "has 20 bytes, too few"),
    ],
)
def test_damage_is_named(
    change: Callable[[bytearray], None],
    error: type[LowtideError],
    match: str,
    path: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=match) as told:
        GgufHeader.read(changed(path, tmp_path / "damaged.gguf", change))
    assert str(told.value).count("fetch it again") <= 1


def tensor_info(data: bytes, name: str) -> int:
    """Where what follows a tensor's name begins: dimensions, type, offset."""
    return data.index(name.encode()) + len(name)


def test_tensors_that_lie_are_refused(path: Path, tmp_path: Path) -> None:
    data, target = path.read_bytes(), tmp_path / "lies.gguf"
    at = tensor_info(data, "blk.1.ffn_up_exps.weight")
    kind, offset = at + 4 + 3 * 8, at + 4 + 3 * 8 + 4
    for change, error, match in (
        (put(offset, "<Q", 0), CheckpointError, "'blk.1.*' begins at byte 0 of .* not at byte 864"),
        (put(offset, "<Q", 865), CheckpointError, "'blk.1.*' begins at byte 865 of .* at byte 864"),
        (put(offset, "<Q", 896), CheckpointError, "'blk.1.*' begins at byte 896 of .* at byte 864"),
        (put(offset, "<Q", 2**62), CheckpointError, "begins at byte 4611686018427387904 of"),
        (put(at + 4, "<Q", 100), CheckpointError, "rows of 100 weights.* blocks of 32"),
        (put(at + 4, "<Q", 0), CheckpointError, r"has the shape \[2, 3, 0\]"),
        (put(at + 12, "<Q", 2**60), CheckpointError, "has the shape"),
        (put(at, "<I", 9), CheckpointError, "has 9 dimensions"),
        (put(kind, "<I", 19), UnsupportedError, "'blk.1.ffn_up_exps.weight' is of type IQ1_S"),
        (put(kind, "<I", 34), UnsupportedError, "type TQ1_0.*supported: Q4_0, .*Choose another"),
        (put(kind, "<I", 999), UnsupportedError, "is of type number 999"),
    ):
        with pytest.raises(error, match=match):
            GgufHeader.read(changed(path, target, change))


def test_types_that_do_not_fit_their_data_are_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    at = tensor_info(data, "blk.1.ffn_up_exps.weight") + 4 + 3 * 8
    for kind in set(Type) - {Type.Q8_0}:
        with pytest.raises((CheckpointError, UnsupportedError)):
            GgufHeader.read(changed(path, tmp_path / "lies.gguf", put(at, "<I", kind)))
    with pytest.raises(CheckpointError, match="'blk.2.*' begins at byte 2496 of .* 'blk.1.*' ends"):
        GgufHeader.read(changed(path, tmp_path / "lies.gguf", put(at, "<I", Type.Q4_0)))


def test_the_first_tensor_begins_the_data(path: Path, tmp_path: Path) -> None:
    at = tensor_info(path.read_bytes(), "blk.0.ffn_up_exps.weight") + 4 + 3 * 8 + 4
    with pytest.raises(CheckpointError, match="'blk.0.*' begins at byte 1 of the data, not at"):
        GgufHeader.read(changed(path, tmp_path / "lies.gguf", put(at, "<Q", 1)))


PLAIN = ("F32", "F16", "BF16")
VECTORS = ["output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.bias", "blk.0.attn_sinks"]


@pytest.mark.parametrize("said", [Type.F16, Type.BF16])
@pytest.mark.parametrize("shape", [(64,), (4, 64)])
@pytest.mark.parametrize("name", [*VECTORS, "blk.0.ffn_gate_exps.bias"])
def test_a_vector_of_another_type_than_llama_cpp_s_is_refused(
    name: str, shape: tuple[int, ...], said: Type, tmp_path: Path
) -> None:
    """Types of as many bytes would pass for one another, and give other numbers."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe")
    data = np.ones((*shape[:-1], shape[-1]), np.float16)
    writer.add_tensor(name, data, raw_dtype=said)
    finish(writer)
    if len(shape) == 2 and name.endswith(".weight"):  # a matrix
        assert GgufHeader.read(tmp_path / "model.gguf").tensors[name].format.name in PLAIN
        return
    with pytest.raises(CheckpointError, match=f"{name}' is of type {said.name}; .* in F32"):
        GgufHeader.read(tmp_path / "model.gguf")


def test_a_packed_vector_is_refused(tmp_path: Path) -> None:
    """As a norm that is float32 would be, if its type said otherwise; it may be the last tensor."""
    writer = gguf.GGUFWriter(tmp_path / "norm.gguf", "qwen3moe")
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    finish(writer)
    at = tensor_info((tmp_path / "norm.gguf").read_bytes(), "output_norm.weight") + 4 + 8
    lies = changed(tmp_path / "norm.gguf", tmp_path / "lies.gguf", put(at, "<I", Type.Q8_0))
    with pytest.raises(CheckpointError, match="'output_norm.weight' is of type Q8_0; .* in F32"):
        GgufHeader.read(lies)


def test_arrays_that_lie_are_refused(path: Path, tmp_path: Path) -> None:
    key = b"tokenizer.ggml.tokens"
    at = path.read_bytes().index(key) + len(key) + 4
    for change, match in (
        (put(at + 4, "<Q", 10**9), "array of 1000000000 values, at least 8000000000 bytes"),
        (put(at, "<I", 9), "has an array of arrays"),
        (put(at, "<I", 77), "has an array of the unknown kind 77"),
        (put(at + 12, "<Q", 2**40), r"goes on to byte \d+ at least, the file has"),
    ):
        with pytest.raises(CheckpointError, match=match):
            GgufHeader.read(changed(path, tmp_path / "lies.gguf", change))


def test_the_file_of_a_folder_is_found(tmp_path: Path) -> None:
    assert first_gguf(tmp_path) is None
    for number in (1, 2, 3):
        (tmp_path / f"big-{number:05d}-of-00003.gguf").touch()
    (tmp_path / "mmproj-F16.gguf").touch()
    assert first_gguf(tmp_path) == tmp_path / "big-00001-of-00003.gguf"
    (tmp_path / "other.gguf").touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF models \(big-00001-of-00003.gguf, other"):
        first_gguf(tmp_path)
