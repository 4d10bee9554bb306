from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import entry, read_array, safetensors_bytes, write_arrays, write_index
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from lowtide.errors import CheckpointError, StorageError
from lowtide.files import json_file
from lowtide.model_folder.checkpoint import MAX_HEADER_BYTES, Checkpoint, TensorEntry

GOLDENS = Path(__file__).parent / "goldens"


def write_single(folder: Path, content: bytes) -> Path:
    (folder / "model.safetensors").write_bytes(content)
    return folder


def write_shards(folder: Path, count: int = 3) -> list[str]:
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        write_arrays(folder / name, {f"t{i}": np.full((2, 3), i, np.float32)})
    return names


def test_entries_are_what_the_library_reads() -> None:
    checkpoint = Checkpoint.open(GOLDENS / "llada2-a")
    expected = load_file(GOLDENS / "llada2-a" / "model.safetensors")
    assert checkpoint.tensors.keys() == expected.keys()
    assert [f.num_bytes for f in checkpoint.files] == [checkpoint.files[0].path.stat().st_size]
    for name, array in expected.items():
        assert checkpoint.tensors[name].shape == array.shape
        np.testing.assert_array_equal(read_array(checkpoint, name), array)


def test_bfloat16_is_read_as_its_bits(tmp_path: Path) -> None:
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    write_arrays(tmp_path / "model.safetensors", {"odd": np.zeros(1, np.uint8), "bits": bits})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors["bits"].dtype == "BF16"
    array = read_array(checkpoint, "bits")
    assert array.dtype == np.uint16
    np.testing.assert_array_equal(array, bits)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    header = {"a": entry(0, 1, []), "b": entry(1, 1, [0, 7]), "c": entry(0, 0)}
    checkpoint = Checkpoint.open(write_single(tmp_path, safetensors_bytes(header, b"\7")))
    assert read_array(checkpoint, "a").item() == 7
    assert read_array(checkpoint, "b").shape == (0, 7)


def test_types_that_are_not_computed_with_have_entries(tmp_path: Path) -> None:
    header = {"a": entry(0, 1, [2], "F4")}
    checkpoint = Checkpoint.open(write_single(tmp_path, safetensors_bytes(header, b"\7")))
    place = (0, checkpoint.files[0].num_bytes - 1, 1, "F4", (2,))
    assert checkpoint.tensors == {"a": TensorEntry(*place)}


def test_a_file_that_changes_later_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"a": np.zeros(100, np.float32)})
    [file] = Checkpoint.open(tmp_path).files
    os.close(file.open())
    os.truncate(path, file.num_bytes - 40)
    numbers = f"{file.num_bytes} bytes then, {file.num_bytes - 40} now"
    with pytest.raises(StorageError, match=f"changed or replaced .*{numbers}"):
        file.open()
    path.unlink()
    with pytest.raises(StorageError, match="is missing"):
        file.open()


@pytest.mark.parametrize("text", ['"%d": {"": 0}', '"%d": []', '"%d": 0'])
def test_a_header_or_index_of_too_many_values_is_not_parsed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed they take fifty times the memory of the file."""
    monkeypatch.setattr(json_file, "MAX_VALUES", 3000)
    many = ("{" + ", ".join(text % i for i in range(4000)) + "}").encode()
    write_single(tmp_path, safetensors_bytes(many))
    with pytest.raises(CheckpointError, match=r"header of .* has about \d+ values; at most 3000"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(many)
    with pytest.raises(CheckpointError, match=r"index.json has about \d+ values; at most 3000"):
        Checkpoint.open(tmp_path)


made = safetensors_bytes

# The library refuses all of them too, but for the names.
WRONG_FILES = [
    ("too few", b"1234567"),
    ("not valid JSON", made(b"{")),
    ("not valid JSON", made(b"\xff{}")),
    ("a JSON object, not a list", made(b"[]")),
    ("nested too deeply", made(b"[" * 200_000)),
    ("1000 bytes but has 12", made(b"{}  ", header_bytes=1000)),
    ("header of 18446744073709551615", b"\xff" * 8 + b"{}"),
    ("100000001 bytes; the format allows", made(b"", b"", 100_000_001)),
    ("occurs twice", made(b'{"a": {}, "a": {}}')),
    ("__metadata__", made({"__metadata__": {"a": 1}})),
    ("__metadata__", made({"__metadata__": []})),
    ("entry of tensor 'a' is not an object", made({"a": 3})),
    ("unknown type 'F31'", made({"a": entry(0, 4, [1], "F31")}, b"1234")),
    ("unknown type None", made({"a": {}})),
    ("data_offsets", made({"a": {"dtype": "U8", "shape": []}}, b"1")),
    ("data_offsets", made({"a": entry(-4, 0)}, b"")),
    ("data_offsets", made({"a": entry(0, 2**64, [])}, b"")),
    ("data_offsets", made(b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0]}}')),
    ("begins at 4 and ends before, at 0", made({"a": entry(4, 0, [4])}, b"1234")),
    ("ends at byte 8 of 4", made({"a": entry(0, 8)}, b"1234")),
    ("has 4 bytes, but shape .3.", made({"a": entry(0, 4, [3])}, b"1234")),
    ("takes 1.5", made({"a": entry(0, 1, [3], "F4")}, b"1")),
    ("shape .-4.", made({"a": entry(0, 4, [-4])}, b"1234")),
    ("shape .True.", made({"a": entry(0, 1, [True])}, b"1")),
    ("shape .1.0.", made({"a": {**entry(0, 1), "shape": [1.0]}}, b"1")),
    ("2..63 elements", made({"a": entry(0, 0, [2**40, 2**40])})),
    ("2..63 elements", made({"a": entry(0, 0, [2**40, 2**40, 0])})),
    ("overlap at data byte 2", made({"a": entry(0, 4), "b": entry(2, 6)}, b"123456")),
    ("overlap at data byte 0", made({"a": entry(0, 4), "b": entry(0, 4)}, b"1234")),
    ("4 to 6 belong to no", made({"a": entry(0, 4), "b": entry(6, 8)}, b"12345678")),
    ("1 bytes after the last", made({"a": entry(0, 4)}, b"12345")),
    ("unprintable", made({"a\n": entry(0, 1)}, b"1")),
]


@pytest.mark.parametrize("num_dimensions", [33, 10_000])
def test_a_shape_of_many_dimensions_is_refused(tmp_path: Path, num_dimensions: int) -> None:
    folder = write_single(tmp_path, made({"a": entry(0, 1, [1] * num_dimensions)}, b"1"))
    told = f"tensor 'a' has {num_dimensions} dimensions; at most 32 are read; fetch"
    with pytest.raises(CheckpointError, match=told):
        Checkpoint.open(folder)


@pytest.mark.parametrize(("message", "content"), WRONG_FILES, ids=range(len(WRONG_FILES)))
def test_wrong_files(tmp_path: Path, message: str, content: bytes) -> None:
    folder = write_single(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(folder)
    assert "model.safetensors" in str(caught.value)
    if message not in ("unprintable", "occurs twice"):
        with pytest.raises(SafetensorError), safe_open(folder / "model.safetensors", "np"):
            pass


def test_a_long_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, MAX_HEADER_BYTES + 100)
    with pytest.raises(CheckpointError, match="the format allows 100000000"):
        Checkpoint.open(tmp_path)


def test_shards_with_an_index(tmp_path: Path) -> None:
    names = write_shards(tmp_path)
    write_index(tmp_path, {f"t{i}": name for i, name in enumerate(names)})
    checkpoint = Checkpoint.open(tmp_path)
    assert [file.path.name for file in checkpoint.files] == names
    assert checkpoint.tensors["t2"].file == 2
    assert read_array(checkpoint, "t2").tolist() == [[2.0] * 3] * 2


def test_shards_that_are_links_into_a_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    names = write_shards(tmp_path / "blobs")
    for i, name in enumerate(names):
        (tmp_path / "blobs" / name).rename(tmp_path / "blobs" / f"{i}")
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{i}")
    write_index(tmp_path / "snapshot", {f"t{i}": name for i, name in enumerate(names)})
    assert len(Checkpoint.open(tmp_path / "snapshot").tensors) == 3
    (tmp_path / "blobs" / "1").unlink()
    with pytest.raises(CheckpointError, match="00002-of-00003.safetensors is missing"):
        Checkpoint.open(tmp_path / "snapshot")


@pytest.mark.parametrize(
    "name",
    [
        *("../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", ".safetensors"),
        *("x.bin", "C:\\x.safetensors", "a\0.safetensors", 3, None, ["x.safetensors"]),
        "x" * 250 + ".safetensors",
    ],
)
def test_an_index_must_name_plain_files(tmp_path: Path, name: object) -> None:
    write_index(tmp_path, {"t0": name})
    with pytest.raises(CheckpointError, match="tensor 't0' is in .* not the plain name"):
        Checkpoint.open(tmp_path)


def test_an_index_that_does_not_match(tmp_path: Path) -> None:
    names = write_shards(tmp_path)
    right = {f"t{i}": name for i, name in enumerate(names)}
    write_index(tmp_path, {**right, "t3": names[0]})
    with pytest.raises(CheckpointError, match="'t3' is in .*00001.* it is in no shard"):
        Checkpoint.open(tmp_path)
    write_index(tmp_path, {**right, "t0": names[1]})
    with pytest.raises(CheckpointError, match="'t0' is in .*00002-.* but it is in no shard"):
        Checkpoint.open(tmp_path)
    write_index(tmp_path, {**right, "t0": names[1], "t1": names[0]})
    with pytest.raises(CheckpointError, match="but it is in model-0000"):
        Checkpoint.open(tmp_path)
    write_index(tmp_path, right)
    write_arrays(
        tmp_path / names[1], {"t1": np.zeros(1, np.float32), "t0": np.zeros(1, np.float32)}
    )
    with pytest.raises(CheckpointError, match="'t0' is both in .*00001.* and in .*00002"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": 3}', "[]", "{"])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index.json"):
        Checkpoint.open(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    names = write_shards(tmp_path)
    assert len(Checkpoint.open(tmp_path).tensors) == 3
    (tmp_path / names[1]).rename(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="2 of 3 shards; number 2 is missing"):
        Checkpoint.open(tmp_path)
    write_shards(tmp_path, 2)
    with pytest.raises(CheckpointError, match="mixes shards of 2 and 3"):
        Checkpoint.open(tmp_path)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no .*safetensors was found"):
        Checkpoint.open(tmp_path)
    write_arrays(tmp_path / "part.safetensors", {"a": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match="found only part.safetensors"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint.open(tmp_path)


RIGHT = safetensors_bytes(
    {
        "__metadata__": {"format": "pt"},
        "a": entry(0, 8, [2, 2], "BF16"),
        "b": entry(8, 12, [1], "F32"),
    },
    bytes(range(12)),
)


@given(
    st.lists(st.tuples(st.integers(0, len(RIGHT) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(RIGHT)),
    st.booleans(),
)
def test_any_damage_is_found_or_harmless(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[int, int]],
    length: int,
    is_cut: bool,
) -> None:
    content = bytearray(RIGHT)
    for position, value in changes:
        content[position] = value
    folder = tmp_path_factory.mktemp("damaged")
    write_single(folder, bytes(content[:length] if is_cut else content))
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError:
        return
    with safe_open(folder / "model.safetensors", "np") as reference:  # it accepts this as well
        assert set(reference.keys()) == checkpoint.tensors.keys()
    ends = [tensor.offset + tensor.num_bytes for tensor in checkpoint.tensors.values()]
    assert max(ends, default=0) <= checkpoint.files[0].num_bytes
