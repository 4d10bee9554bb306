"""FP8, GPTQ, AWQ and compressed-tensors: kept as stored, multiplied with what they stand for.

Twenty seconds: eight ways to round, each a model that is opened with several formats and budgets.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import rounded_files
import torch
from inside import engine_of
from rounded_files import QUANTISATIONS, Rounded, awq, fp8, gptq, pack_quantized, write_rounded
from safetensors.torch import load_file, save_file

from lowtide import LLM
from lowtide.doctor import doctor
from lowtide.errors import CheckpointError, LowtideError, PlanError, UnsupportedError
from lowtide.families import read_config
from lowtide.formats import format_of
from lowtide.formats.arranged import Arranged
from lowtide.formats.fp8 import nearest
from lowtide.formats.plain import plain_format
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.reference import Kernels
from lowtide.llm import plan_model
from lowtide.memory.arena import Arena
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_writing.synth import synth
from lowtide.reading.file_reader import FileReader, MatrixRead, matrix_bytes_at_once

FORMATS: dict[str, Callable[[], Rounded]] = {
    "GPTQ v1 of 32 to a F16 scale": lambda: gptq((48, 96), 32, 0),
    "GPTQ v2 of 128 to a F16 scale": lambda: gptq((40, 384), 128, 1, version=2),
    "GPTQ v1 of 64 to a BF16 scale": lambda: gptq((8, 64), 64, 2, dtype=torch.bfloat16),
    "AWQ of 128 to a F16 scale": lambda: awq((64, 256), 128, 3),
    "AWQ of 32 to a F32 scale": lambda: awq((8, 96), 32, 4, dtype=torch.float32),
    "pack-quantized int4 of 128 to a BF16 scale": lambda: pack_quantized((24, 256), 128, 5),
    "pack-quantized int4 of 64 to a F32 scale": lambda: pack_quantized(
        (11, 192), 64, 5, dtype=torch.float32
    ),
    "pack-quantized int4 of 32 to a F16 scale and zero": lambda: pack_quantized(
        (72, 64), 32, 6, is_symmetric=False, dtype=torch.float16
    ),
    "pack-quantized int8 of 32 to a BF16 scale": lambda: pack_quantized((40, 64), 32, 7, 8),
    "pack-quantized int8 of 64 to a F32 scale and zero": lambda: pack_quantized(
        (16, 128), 64, 8, 8, False, torch.float32
    ),
    "GPTQ v1 of rows (groups of 128 in memory) to a F16 scale": lambda: gptq((48, 384), 384, 12),
    "GPTQ v2 of rows (groups of 128 in memory) to a BF16 scale": lambda: gptq(
        (16, 256), 256, 13, version=2, dtype=torch.bfloat16
    ),
    "AWQ of rows (groups of 128 in memory) to a F16 scale": lambda: awq((64, 640), 640, 14),
    "pack-quantized int4 of rows (groups of 128 in memory) to a F32 scale": lambda: pack_quantized(
        (11, 384), 384, 15, dtype=torch.float32
    ),
    "pack-quantized int8 of rows (groups of 64 in memory) to a BF16 scale": lambda: pack_quantized(
        (40, 192), 192, 16, 8
    ),
    "pack-quantized int8 of rows (groups of 128 in memory) to a F16 scale and zero": (
        lambda: pack_quantized((72, 256), 256, 17, 8, False, torch.float16)
    ),
    "FP8 of 128 by 128 to a F32 scale": lambda: fp8((300, 200), 9),
    "FP8 of 128 by 128 to a BF16 scale": lambda: fp8((64, 640), 10, torch.bfloat16),
}


def read(folder: Path, name: str, dtype: torch.dtype | None, buffer_bytes: int):
    """The matrix `m.weight` of a folder: kept, or in a plain type."""
    checkpoint = Checkpoint.open(folder)
    stored = format_of(name)
    assert isinstance(stored, Arranged)
    shape = tuple(load_file(folder / "shape" / "shape.safetensors")["shape"].tolist())
    wanted = stored.kept if dtype is None else plain_format(dtype)
    arena = Arena(stored.kept.matrix_bytes(shape) + 4 * shape[0] * shape[1])
    content = arena.tensor(0, (wanted.matrix_bytes(shape),), torch.uint8)
    tensors = [checkpoint.tensors["m" + each.ending] for each in stored.tensors(shape)]
    places = tuple((each.file, each.offset) for each in tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file system without direct reads says so
        reader = FileReader(
            checkpoint.files, max(buffer_bytes, matrix_bytes_at_once(stored, shape))
        )
    try:
        target = arena.array()[: content.numel()]
        reads = [MatrixRead("m.weight", places, stored, shape, target, wanted)]
        assert reader.submit(reads).result() == sum(each.num_bytes for each in tensors)
    finally:
        reader.close()
    if dtype is None:
        return stored.kept.matrix([content], shape)
    return content.view(dtype).view(shape).clone()


def write(folder: Path, made: Rounded) -> None:
    save_file({"m" + end: x for end, x in made.tensors.items()}, folder / "model.safetensors")
    (folder / "shape").mkdir()
    shape = {"shape": torch.tensor(made.weights.shape)}
    save_file(shape, folder / "shape" / "shape.safetensors")


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_what_its_numbers_stand_for(
    name: str, buffer_bytes: int, tmp_path: Path
) -> None:
    made = FORMATS[name]()
    write(tmp_path, made)
    matrix = read(tmp_path, name, None, buffer_bytes)
    assert tuple(matrix.shape) == tuple(made.weights.shape)
    stored_bytes = sum(x.nbytes for end, x in made.tensors.items() if end != ".g_idx")
    assert matrix.nbytes <= stored_bytes + made.weights.numel() // 32  # a zero has a byte
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(made.weights.shape, dtype=dtype)
        matrix.unpack(out)
        assert torch.equal(out, made.weights.to(dtype)), "rounded once"
        assert torch.equal(read(tmp_path, name, dtype, buffer_bytes), out), "unpacked as read"


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    made = FORMATS[name]()
    write(tmp_path, made)
    matrix = read(tmp_path, name, None, 1 << 20)
    middle = slice(len(made.weights) // 3, None)
    chosen = torch.tensor([3, 0, len(made.weights) - 1, 3])
    for features in (middle, chosen):
        part = matrix.rows(features)
        out = torch.empty(part.shape)
        part.unpack(out)
        assert torch.equal(out, made.weights[features])
    again = matrix.rows(middle).rows(slice(2, 5))
    out = torch.empty(again.shape)
    again.unpack(out)
    assert torch.equal(out, made.weights[middle][2:5])


def test_as_many_rows_as_there_are_blocks_have_their_own_scales(tmp_path: Path) -> None:
    made = fp8((512, 256), 11)  # 4 rows of blocks
    write(tmp_path, made)
    matrix = read(tmp_path, "FP8 of 128 by 128 to a F32 scale", None, 1 << 20)
    part = matrix.rows(slice(128, 132)).rows(slice(1, 3))
    out = torch.empty(part.shape)
    part.unpack(out)
    assert torch.equal(out, made.weights[129:131])


def test_experts_that_are_rounded_in_some_layers_alone_are_refused(
    rounded: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    folder, plain = rounded("compressed-tensors")
    folder = Path(shutil.copytree(folder, tmp_path / "rounded"))
    weights, others = (load_file(each / "model.safetensors") for each in (folder, plain))
    first = "model.layers.0.mlp.experts."
    mixed = {name: x for name, x in weights.items() if not name.startswith(first)}
    mixed |= {name: x for name, x in others.items() if name.startswith(first)}
    save_file(mixed, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match="in all layers alike or in none"):
        plan_model(folder, context=64)


def test_every_byte_of_float8_is_the_number_that_torch_has() -> None:
    numbers = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(numbers).view(torch.float8_e4m3fn).float()
    sections = [numbers[None], np.ones(2, np.float32).view(np.uint8)[None]]
    found = format_of("FP8 of 128 by 128 to a F32 scale").kept.weights(sections, np.arange(1), 256)
    assert torch.equal(torch.from_numpy(found)[0].nan_to_num(999), expected.nan_to_num(999))


def test_the_nearest_float8_is_that_of_torch() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 90
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(torch.from_numpy(nearest(values)), expected)


# Models


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("rounded") / "source", seed=3)


@pytest.fixture(scope="module")
def rounded(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """A model of a way to round and its plain twin, made once: to read only."""
    return cache(lambda name: write_rounded(source, tmp_path_factory.mktemp("rounded"), name))


def logits(folder: Path, **options: object) -> torch.Tensor:
    with LLM(folder, context=64, **options) as llm:
        return llm.logits(list(range(2, 40)))


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_a_model_has_the_logits_of_its_dequantised_weights(
    name: str, rounded: Callable[[str], list[Path]]
) -> None:
    folder, plain = rounded(name)
    expected = logits(plain)
    found = logits(folder)
    assert (found - expected).abs().max() <= 2e-4 * expected.abs().max()
    plan, plain_plan = plan_model(folder, context=64), plan_model(plain, context=64)
    assert not plan.formats.is_own and plain_plan.formats.is_own
    assert "rounded as they are read" not in plan.reason
    assert plan.host.slot_bytes < plain_plan.host.slot_bytes / (3.5 if name == "fp8" else 5)
    assert torch.equal(logits(folder, host_memory=plan.minimum_bytes), found), "any budget"
    unpacked = logits(folder, expert_dtype="float32", dense_dtype="float32")
    assert (unpacked - expected).abs().max() <= 2e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("family", "name", "endings"),
    [
        ("mixtral", "gptq", ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")),
        ("olmoe", "awq", ("_proj.weight",)),
        ("deepseek_v2", "compressed-tensors", ("_proj.weight", "_mqa.weight")),
        ("bailing_moe_v2", "fp8", ("_proj.weight", "key_value.weight", "dense.weight")),
        ("qwen2_moe", "fp8", ("_proj.weight", "shared_expert_gate.weight")),
        ("deepseek_v3", "fp8", ("_proj.weight", "_mqa.weight")),
        ("minimax_m2", "fp8", ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")),
        ("qwen3_5_moe", "fp8", ("_proj.weight", "_qkv.weight", "_z.weight")),
        ("qwen3_5_moe", "gptq", ("gate_proj.weight", "up_proj.weight", "down_proj.weight")),
        ("qwen3_next", "fp8", ("_proj.weight", "_qkvz.weight")),
    ],
)
def test_models_of_other_families_have_the_logits_of_their_dequantised_weights(
    family: str, name: str, endings: tuple[str, ...], tmp_path: Path
) -> None:
    model = synth(family, "tiny", tmp_path / "source", seed=3)
    folder, plain = write_rounded(model, tmp_path, name, endings)
    expected, found = logits(plain), logits(folder)
    assert (found - expected).abs().max() <= 2e-4 * expected.abs().max()
    plan = plan_model(folder, context=64)
    assert not plan.formats.is_own
    assert torch.equal(logits(folder, host_memory=plan.minimum_bytes), found), "any budget"


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_compiled_kernels_have_the_bits_of_the_same_weights(
    name: str, rounded: Callable[[str], list[Path]]
) -> None:
    found = []
    for folder in rounded(name):
        with LLM(folder, context=64, dtype="bfloat16") as llm:
            if not isinstance(engine_of(llm).kernels, CompiledKernels):
                pytest.skip("nothing can be compiled here")
            found.append(llm.logits(list(range(2, 9))))
    assert torch.equal(*found)


def test_doctor_measures_with_the_kernels_of_the_engine(
    rounded: Callable[[str], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = rounded("awq")
    asked = []

    def measure(*_: object, kernels: Kernels, **__: object) -> NoReturn:
        asked.append(kernels)
        raise PlanError("That was enough.")

    monkeypatch.setattr(doctor, "measure_costs", measure)
    monkeypatch.setattr(doctor, "machine_rates", lambda *_, **__: [])
    with pytest.raises(PlanError, match="enough"):
        doctor.diagnose(folder, dtype="bfloat16", device="cpu", is_fresh=True)
    with LLM(folder, context=64, dtype="bfloat16", device="cpu") as llm:
        assert [kernels.name for kernels in asked] == [llm.kernels]


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def apply(weights: dict[str, torch.Tensor]) -> None:
        del weights[name]

    return apply


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
    def apply(weights: dict[str, torch.Tensor]) -> None:
        weights[name] = change(weights[name]).contiguous()

    return apply


def added(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    def apply(weights: dict[str, torch.Tensor]) -> None:
        weights[name] = tensor

    return apply


EXPERT = "model.layers.2.mlp.experts.5.up_proj"
DENSE = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        ("gptq", without(f"{EXPERT}.scales"), CheckpointError, f"no {EXPERT}.scales"),
        ("gptq", without(f"{EXPERT}.qzeros"), CheckpointError, f"no tensor {EXPERT}.qzeros"),
        ("gptq", without(f"{DENSE}.g_idx"), CheckpointError, f"no tensor {DENSE}.g_idx"),
        ("gptq", without(f"{DENSE}.qweight"), CheckpointError, f"no tensor {DENSE}.weight"),
        (
            "awq",
            replaced(f"{EXPERT}.qweight", lambda x: x.t()),
            CheckpointError,
            rf"{EXPERT}.qweight is of type I32 and shape \[8, 64\].*makes it I32 \[64, 8\]",
        ),
        (
            "awq",
            replaced(f"{DENSE}.scales", lambda x: x.to(torch.float64)),
            UnsupportedError,
            f"{DENSE}.scales is of type F64",
        ),
        (
            "compressed-tensors",
            replaced(f"{EXPERT}.weight_zero_point", lambda x: x.to(torch.int64)),
            CheckpointError,
            f"{EXPERT}.weight_zero_point is of type I64",
        ),
        ("fp8", without(f"{EXPERT}.weight_scale_inv"), CheckpointError, f"no {EXPERT}.*scale_inv"),
        (
            "gptq",
            replaced(f"{DENSE}.g_idx", lambda x: x.flip(0)),
            UnsupportedError,
            f"{DENSE}.weight: its g_idx is not in order: act-order",
        ),
        (
            "gptq",
            replaced(f"{EXPERT}.g_idx", lambda x: x.flip(0)),
            UnsupportedError,
            f"{EXPERT}.weight: its g_idx is not in order: act-order",
        ),
        (
            "compressed-tensors",
            added(f"{EXPERT}.weight_g_idx", torch.zeros(64, dtype=torch.int32)),
            UnsupportedError,
            f"{EXPERT}.weight_g_idx: act-order",
        ),
        (
            "awq",
            added(f"{DENSE}.weight", torch.zeros(64, 64)),
            CheckpointError,
            f"{DENSE}.weight both rounded and not",
        ),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said_with_its_name(
    kind: str,
    change: Callable[[dict], None],
    error: type[LowtideError],
    message: str,
    rounded: Callable[[str], list[Path]],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(rounded(kind)[0], tmp_path / "rounded"))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(error, match=message):
        logits(folder)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gptq", {"desc_act": True}, r"GPTQ with act-order \(desc_act\)"),
        ("gptq", {"checkpoint_format": "marlin"}, "GPTQ packed as 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "GPTQ packed as 'marlin'"),
        ("gptq", {"bits": 3}, "GPTQ in 3 bits"),
        ("gptq", {"group_size": 96}, "GPTQ in groups of 96"),
        ("awq", {"group_size": 0}, "AWQ in groups of 0"),
        ("gptq", {"format": "marlin"}, "GPTQ packed as 'marlin'"),
        ("awq", {"version": "gemv"}, "AWQ in version 'gemv'"),
        ("awq", {"version": None, "checkpoint_format": "gemv_fast"}, "AWQ in version 'gemv_fast'"),
        ("awq", {"version": None, "format": "llm-awq"}, "AWQ in version 'llm-awq'"),
        ("awq", {"bits": True}, "AWQ in True bits"),
        ("compressed-tensors", {"format": "float-quantized"}, "compressed-tensors in 'float-q"),
        ("compressed-tensors", {"config_groups": {}}, "with 0 kinds of weights"),
        (
            "compressed-tensors",
            {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            r"compressed-tensors of a model that was rotated before \(transform_config\)",
        ),
        ("fp8", {"weight_block_size": None}, "FP8 with one scale for a tensor"),
        ("fp8", {"weight_block_size": [64, 64]}, "FP8 by blocks of 64 by 64"),
        ("fp8", {"quant_method": "hqq"}, "format is 'hqq'"),
    ],
)
def test_other_variants_are_refused_by_name(
    kind: str, changes: dict, message: str, source: Path
) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {**QUANTISATIONS[kind][0], **changes}
    refusal = f"{message}.* which is not read. Read are safetensors in bfloat16"
    with pytest.raises(UnsupportedError, match=refusal):
        read_config(config)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gptq", {"format": "gptq_v2", "checkpoint_format": None}),
        ("awq", {"version": None, "format": "gemm", "checkpoint_format": "gemm"}),
        ("compressed-tensors", {"transform_config": {}, "sparsity_config": {}}),
        # With one group there is nothing that another order could change.
        ("gptq", {"format": "gptq_v2", "group_size": -1, "desc_act": True}),
    ],
)
def test_newer_tools_keys_are_read(kind: str, changes: dict, source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {**QUANTISATIONS[kind][0], **changes}
    found = read_config(config).quantisation
    assert found is not None and (found.method, found.version) == (kind, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actorder": "group"}, "with act-order .'group'"),
        ({"strategy": "tensor"}, "scales by 'tensor'"),
        ({"group_size": None}, "in groups of None"),
        ({"num_bits": 2}, "in 2 bits"),
        ({"type": "float"}, "'float' weights"),
    ],
)
def test_other_schemes_are_refused_by_name(changes: dict, message: str, source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    said = json.loads(json.dumps(QUANTISATIONS["compressed-tensors"][0]))
    said["config_groups"]["group_0"]["weights"] |= changes
    config["quantization_config"] = said
    with pytest.raises(UnsupportedError, match=f"compressed-tensors.*{message}"):
        read_config(config)


@pytest.mark.parametrize("said", [["pack-quantized"], {"a": 1}, "naive-quantized", 3])
def test_other_forms_are_refused_by_name(said: object, source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {**QUANTISATIONS["compressed-tensors"][0], "format": said}
    with pytest.raises(UnsupportedError, match="compressed-tensors in "):
        read_config(config)


@pytest.mark.parametrize("kind", ["GPTQ v1", "AWQ", "pack-quantized int4"])
def test_rows_with_one_scale_that_no_group_divides_are_refused(kind: str) -> None:
    """In memory a scale is of 32 weights at least."""
    form = format_of(f"{kind} of rows (groups of 32 in memory) to a F16 scale")
    assert isinstance(form, Arranged)
    with pytest.raises(CheckpointError, match="its input 40 does not divide into 32"):
        form.tensors((16, 40))


def test_a_plan_of_a_rounded_model_wants_its_headers(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = rounded_files.QUANTISATIONS["awq"][0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="told by their files' headers"):
        plan_model(tmp_path)
