"""A format is one file: this one alone makes two up, and all of lowtide knows them.

Weights of float16 as offsets of their bits from those of one: in 16 bits, and, so that layers
differ in size, in 32. Both are multiplied with as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from lowtide import SamplingParams
from lowtide.cli.app import app
from lowtide.errors import CheckpointError, UnsupportedError
from lowtide.formats import MatrixFormat, format_of, formats, register, unregister
from lowtide.formats.matrix import Bytes
from lowtide.llm import LLM, plan_model
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_writing.safetensors_writer import OutputTensor, SafetensorsWriter
from lowtide.model_writing.synth import synth

ONE = 0x3C00  # the bits of 1.0
PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


class OffsetMatrix:
    """Made into float16 for every product."""

    def __init__(self, offsets: Tensor) -> None:
        self._offsets = offsets

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._offsets.shape)

    @property
    def nbytes(self) -> int:
        return self._offsets.nbytes

    @property
    def device(self) -> torch.device:
        return self._offsets.device

    def rows(self, features: slice | Tensor) -> OffsetMatrix:
        return OffsetMatrix(self._offsets[features])

    def unpack(self, out: Tensor) -> None:
        out.copy_((self._offsets.int() + ONE).to(torch.int16).view(torch.float16))


class Offsets(MatrixFormat):
    unpacked = "F16"
    is_kept = True

    def __init__(self, name: str, dtype: str, numpy_dtype: str, torch_dtype: torch.dtype) -> None:
        self.name, self.dtypes, self.block_bytes = name, (dtype,), (torch_dtype.itemsize,)
        self._numpy_dtype, self._torch_dtype = numpy_dtype, torch_dtype

    def unpack(self, *stored: Bytes) -> Bytes:
        bits = stored[0].view(self._numpy_dtype).astype(np.int32) + ONE
        return bits.astype(np.uint16).view(np.uint8)

    def pack(self, float16: Bytes) -> bytes:
        return (float16.view(np.uint16).astype(np.int64) - ONE).astype(self._numpy_dtype).tobytes()

    def matrix(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> OffsetMatrix:
        return OffsetMatrix(tensors[0].view(self._torch_dtype).view(shape))

    def has_tensor(self, name: str, dtype: str) -> bool:
        return dtype == self.dtypes[0]

    def is_finite(self, stored: Bytes) -> bool:
        return formats()["F16"].is_finite(self.unpack(stored))


SHORT = Offsets("OFFSET16", "I16", "i2", torch.int16)
LONG = Offsets("OFFSET32", "I32", "i4", torch.int32)


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    for each in (SHORT, LONG):
        register(each)
    yield
    for each in (SHORT, LONG):
        unregister(each.name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with float16 weights."""
    folder = synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("toy") / "bf16", seed=3)
    return stored_as(folder, folder.parent / "plain", lambda name, shape: None)


@pytest.fixture(scope="module")
def mixed(plain: Path) -> Path:
    """The same model: layer 0 in 16 bits, of the others gate in 32, and lm_head in 16."""

    def choose(name: str, shape: tuple[int, ...]) -> Offsets | None:
        if name == "lm_head.weight":
            return SHORT
        if ".experts." not in name:
            return None
        if ".layers.0." in name:
            return SHORT
        return LONG if "gate_proj" in name else None

    return stored_as(plain, plain.parent / "mixed", choose)


def stored_as(
    folder: Path, target: Path, choose: Callable[[str, tuple[int, ...]], Offsets | None]
) -> Path:
    """A copy whose tensors are of the formats chosen, those not chosen float16."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json":
            text = path.read_text().replace('"bfloat16"', '"float16"')
            if "index" not in path.name:
                (target / path.name).write_text(text)
    checkpoint = Checkpoint.open(folder)
    outputs: list[tuple[OutputTensor, bytes]] = []
    for name, entry in checkpoint.tensors.items():
        content = np.fromfile(
            checkpoint.files[entry.file].path, np.uint8, entry.num_bytes, offset=entry.offset
        )
        values = torch.from_numpy(content).view(
            torch.bfloat16 if entry.dtype == "BF16" else torch.float16
        )
        float16 = values.half().view(torch.uint8).numpy()
        chosen = choose(name, entry.shape)
        dtype = "F16" if chosen is None else chosen.dtypes[0]
        data = float16.tobytes() if chosen is None else chosen.pack(float16)
        outputs.append((OutputTensor(name, dtype, entry.shape), data))
    with SafetensorsWriter(target / "model.safetensors", [t for t, _ in outputs]) as writer:
        for _, data in outputs:
            writer.write(data)
    return target


def run(folder: Path, **options: Any) -> tuple[list[int], Tensor]:
    with LLM(folder, context=64, **options) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids, llm.logits(PROMPT)


@pytest.fixture(scope="module")
def expected(plain: Path) -> tuple[list[int], Tensor]:
    return run(plain, kernels="reference")


@examples(5)
@given(
    policy=st.sampled_from(["lowtide", "lru", "tide", "dali"]),
    share=st.floats(0, 1),
    device=st.sampled_from(["cpu", "emulated"]),
    expert_dtype=st.sampled_from([None, "float16"]),
)
def test_the_same_weights_in_another_format_give_the_same_bits(
    mixed: Path,
    expected: tuple[list[int], Tensor],
    policy: str,
    share: float,
    device: str,
    expert_dtype: str | None,
) -> None:
    options: dict[str, Any] = {"device": device, "expert_dtype": expert_dtype, "policy": policy}
    plan = plan_model(mixed, context=64, **options)
    budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
    options["host_memory" if device == "cpu" else "gpu_memory"] = budget
    answer, logits = run(mixed, **options)
    assert answer == expected[0] and torch.equal(logits, expected[1])


def test_slots_are_as_large_as_the_largest_layer_and_the_plan_says_so(
    plain: Path, mixed: Path
) -> None:
    one = plan_model(plain, context=64).host
    kept = plan_model(mixed, context=64).host
    unpacked = plan_model(mixed, context=64, expert_dtype="float16").host
    assert unpacked.slot_bytes == one.slot_bytes and unpacked.unused_slot_bytes == 0
    matrix_bytes = one.slot_bytes // 3
    assert kept.slot_bytes == one.slot_bytes + matrix_bytes
    assert 0 < kept.unused_slot_bytes < matrix_bytes
    shown = CliRunner().invoke(app, ["plan", str(mixed), "--context", "64"]).output
    assert "unused, as layers' formats differ" in " ".join(shown.split())


def test_what_is_not_finite_is_found_and_named(plain: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    folder = stored_as(plain, tmp_path / "broken", lambda n, _: SHORT if "up_proj" in n else None)
    entry = Checkpoint.open(folder).tensors[name]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(entry.offset + 6)
        file.write((0x7C00 - ONE).to_bytes(2, "little"))
    with pytest.raises(CheckpointError, match=f"{name} in .* holds an infinity or NaN"):
        LLM(folder, context=64, check_weights=True)


def test_experts_of_a_layer_are_of_one_format(plain: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    folder = stored_as(plain, tmp_path / "odd", lambda n, _: LONG if n == name else None)
    with pytest.raises(UnsupportedError, match=f"{name} is of type I32, but of another expert"):
        plan_model(folder, context=64)


def test_a_toy_format_comes_and_goes(mixed: Path) -> None:
    assert format_of("I16") is SHORT and formats()["OFFSET32"] is LONG
    with pytest.raises(ValueError, match="OFFSET16 has its name or its tensors"):
        register(SHORT)
    unregister("OFFSET16")
    with pytest.raises(UnsupportedError, match="I16; supported: BF16, F16, F32, I32"):
        plan_model(mixed, context=64)
    register(SHORT)
