"""Experts' inputs: what is recorded is what the model multiplied with, and rounding heeds it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from checkpoint_files import in_layout
from inside import engine_of
from torch import Tensor
from torch.nn.functional import silu
from typer.testing import CliRunner
from whole import planner_of

from lowtide import LLM, SamplingParams
from lowtide.cli.app import app
from lowtide.core import Step, StepKind
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import OpenModel, open_model
from lowtide.engine.planning import format_plans
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.planning.planner import Planner
from lowtide.errors import UnsupportedError, UsageError
from lowtide.experts.rows import Routing
from lowtide.formats.expert_inputs import PRIOR_ROWS, ExpertInputs
from lowtide.lab.calibrate import calibrate
from lowtide.lab.input_squares import InputSquares
from lowtide.llm import plan_model
from lowtide.model_folder.demo_tasks import held_out_text
from lowtide.model_writing.pack import pack
from lowtide.model_writing.synth import synth
from lowtide.plan import FormatPlan, MemoryPlan
from lowtide.replay.calibration import Calibration
from lowtide.replay.trace import TraceShape

TOKEN_IDS = np.random.default_rng(0).integers(3, 300, 120).tolist()
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
STEP = Step(StepKind.PREFILL, 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return made(models, "qwen2_moe")


@pytest.fixture(scope="module")
def calibrated(model: Path) -> Path:
    """The calibration of `model` with its experts' inputs."""
    path = model.parent / "c.lowtide"
    with LLM(model, context=256) as llm:
        calibrate(llm, TOKEN_IDS, "m", num_pieces=4, inputs=True).save(path)
    return path


def made(models: Path, family: str) -> Path:
    folder = models / family
    return folder if folder.exists() else synth(family, "tiny", folder, seed=6)


class Rows:
    """Keeps every layer's rows and whom they chose."""

    def __init__(self, num_layers: int) -> None:
        self.seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        self.seen[layer].append((x.double(), routing.experts.clone()))

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        rows, chosen = zip(*self.seen[layer], strict=True)
        return torch.cat(rows), torch.cat(chosen)


def matrices(llm: LLM, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down, each [in, out] in float64."""
    shape = llm.config.moe_shape
    hidden, width = shape.hidden_size, shape.expert_size
    columns = llm.expert_columns(layer, expert, max(hidden, width)).double()
    gate, up, down = columns.split(hidden * width)
    return gate.view(hidden, width), up.view(hidden, width), down.view(width, hidden)


def slow_count(llm: LLM, rows: Rows) -> ExpertInputs:
    """One expert after the other, in float64."""
    shape = llm.config.moe_shape
    of_experts = (shape.num_layers, shape.num_experts)
    num_rows = np.zeros(of_experts, np.int64)
    hidden = np.zeros((*of_experts, shape.hidden_size), np.float32)
    activated = np.zeros((*of_experts, shape.expert_size), np.float32)
    for layer, expert in np.ndindex(of_experts):
        x, chosen = rows.of(layer)
        own = x[(chosen == expert).any(1)]
        num_rows[layer, expert] = len(own)
        if len(own):
            gate, up, _ = matrices(llm, layer, expert)
            hidden[layer, expert] = own.square().mean(0)
            activated[layer, expert] = (silu(own @ gate) * (own @ up)).square().mean(0)
    return ExpertInputs("", num_rows, hidden, activated)


def recorded(llm: LLM, ask: Any) -> tuple[ExpertInputs, Rows]:
    squares = InputSquares(TraceShape(*llm.config.moe_shape))
    rows = Rows(llm.config.num_moe_layers)
    with llm.observed(rows, experts=squares):
        ask(llm)
    return squares.inputs("mine"), rows


def check_near(found: ExpertInputs, wanted: ExpertInputs, tolerance: float) -> None:
    assert np.array_equal(found.num_rows, wanted.num_rows)
    is_seen = found.num_rows > 0
    for name in ("hidden", "activated"):
        near, exact = getattr(found, name)[is_seen], getattr(wanted, name)[is_seen]
        assert near.dtype == np.float32
        np.testing.assert_allclose(near, exact, rtol=tolerance, atol=tolerance * exact.max())


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("has_room", [True, False])
def test_what_is_recorded_is_what_was_multiplied_with(
    model: Path, dtype: str, tolerance: float, has_room: bool
) -> None:
    options: dict[str, Any] = {"context": 64, "dtype": dtype}
    if not has_room:
        options["host_memory"] = plan_model(model, **options).minimum_bytes
    with LLM(model, **options) as llm:
        [alone] = llm.generate(TOKEN_IDS[:30], PARAMS)
        answers = []
        found, rows = recorded(
            llm, lambda llm: answers.extend(llm.generate(TOKEN_IDS[:30], PARAMS))
        )
        check_near(found, slow_count(llm, rows), tolerance)
    assert answers[0].token_ids == alone.token_ids


def test_long_passes_are_recorded_tile_by_tile(models: Path) -> None:
    ids = np.random.default_rng(1).integers(3, 300, 700).tolist()
    with LLM(made(models, "llada_moe"), context=1024, dtype="float32") as llm:
        found, rows = recorded(llm, lambda llm: llm.logits(ids))
        assert found.num_rows.sum() == 700 * found.num_rows.shape[0] * rows.of(0)[1].shape[1]
        check_near(found, slow_count(llm, rows), 1e-4)


def test_experts_without_rows_have_their_layer_s(model: Path) -> None:
    with LLM(model, context=64, dtype="float32") as llm:
        found, rows = recorded(llm, lambda llm: llm.generate(TOKEN_IDS[:1], PARAMS))
        x, chosen = rows.of(0)
    [unseen, *_] = np.flatnonzero(found.num_rows[0] == 0)
    pairs = x.square().sum(0) / len(x)  # as many experts for each row
    np.testing.assert_allclose(found.hidden[0, unseen], pairs, rtol=1e-4)
    assert found.num_unseen == (found.num_rows == 0).sum()


def test_few_rows_count_beside_the_layer_s() -> None:
    num_rows = np.array([[3, 1, 0]])
    hidden = np.array([[[1.0, 5.0], [9.0, 1.0], [3.0, 4.0]]], np.float32)
    inputs = ExpertInputs("mine", num_rows, hidden, hidden[:, :, :1])
    of_layer = np.array([3.0, 4.0])
    for expert, rows in enumerate(num_rows[0]):
        wanted = (rows * hidden[0, expert] + PRIOR_ROWS * of_layer) / (rows + PRIOR_ROWS)
        np.testing.assert_allclose(inputs.importance(0, expert, False), wanted, rtol=1e-6)
    assert inputs.importance(0, 1, True).tolist() == pytest.approx([(9 + 16 * 3) / 17])


def test_a_file_keeps_them(calibrated: Path, tmp_path: Path) -> None:
    calibration = Calibration.load(calibrated)
    inputs = calibration.inputs
    assert inputs is not None and calibration.buddies is None
    calibration.save(tmp_path / "again")
    again = Calibration.load(tmp_path / "again").inputs
    assert again is not None and again.digest == inputs.digest
    assert again.fingerprint == inputs.fingerprint
    assert inputs.hidden.dtype == inputs.activated.dtype == np.float32
    assert Calibration.load(calibrated, has_inputs=False).inputs is None


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("num_rows", np.zeros((1, 1), np.int64), "shape of its rows"),
        ("hidden", np.zeros((1, 1, 1), np.float32), "shape of its hidden inputs"),
        ("hidden", np.nan, "hidden inputs: there are values that cannot be"),
        ("activated", -1.0, "activated inputs: there are values"),
    ],
)
def test_contradictions_are_refused(
    calibrated: Path, tmp_path: Path, name: str, value: Any, reason: str
) -> None:
    with np.load(calibrated) as file:
        arrays = dict(file)
    array = arrays[f"inputs_{name}"]
    arrays[f"inputs_{name}"] = (
        value if isinstance(value, np.ndarray) else np.full_like(array, value)
    )
    with (tmp_path / "c").open("wb") as out:
        np.savez_compressed(out, **arrays)
    with pytest.raises(UsageError, match=reason):
        Calibration.load(tmp_path / "c")
    del arrays[f"inputs_{name}"]
    with (tmp_path / "c").open("wb") as out:
        np.savez_compressed(out, **arrays)
    with pytest.raises(UsageError, match="not a lowtide calibration that can be read"):
        Calibration.load(tmp_path / "c")


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("format", ["q8", "q4"])
def test_a_packed_model_is_what_is_rounded_as_it_is_read(
    model: Path, calibrated: Path, tmp_path: Path, format: str
) -> None:
    packed = pack(model, tmp_path / "packed", format, calibration=calibrated)
    plain = pack(model, tmp_path / "plain", format)
    with LLM(model, context=64, format=format, calibration=str(calibrated)) as llm:
        wanted, columns = llm.logits(TOKEN_IDS[:30]), llm.expert_columns(0, 1, 10**6)
        assert "(calibrated)" in str(llm.plan.formats)
    with LLM(packed, context=64) as llm:
        assert torch.equal(llm.logits(TOKEN_IDS[:30]), wanted)
        assert torch.equal(llm.expert_columns(0, 1, 10**6), columns)
    with LLM(plain, context=64) as llm:
        assert not torch.equal(llm.logits(TOKEN_IDS[:30]), wanted)
    told = [json.loads((each / "config.json").read_text()) for each in (packed, plain)]
    inputs = Calibration.load(calibrated).inputs
    assert told[0]["quantization_config"].pop("inputs_sha256") == inputs.digest
    assert told[0] == told[1]


def test_python_and_compiled_kernels_pack_the_same_bytes(
    model: Path, calibrated: Path, tmp_path: Path
) -> None:
    folders = [
        pack(model, tmp_path / kernels, "q4", kernels=kernels, calibration=calibrated)
        for kernels in ("auto", "reference")
    ]
    assert weights_of(folders[0]) == weights_of(folders[1])


def test_stacked_experts_have_their_own(models: Path, calibrated: Path, tmp_path: Path) -> None:
    """Every expert's matrix in a tensor with all others', as some tools write them."""
    from safetensors.torch import load_file, save_file

    model, folder = made(models, "qwen2_moe"), tmp_path / "stacked"
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        tensors |= load_file(path)
    stacked_tensors = in_layout(tensors, "transformers", torch.stack, torch.cat)
    save_file(stacked_tensors, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    packed = pack(model, tmp_path / "packed", expert_dtype="q4", calibration=calibrated)
    stacked = pack(folder, tmp_path / "other", expert_dtype="q4", calibration=calibrated)
    with LLM(packed, context=64) as one, LLM(stacked, context=64) as other:
        assert torch.equal(one.logits(TOKEN_IDS[:30]), other.logits(TOKEN_IDS[:30]))


def error_of(wanted: LLM, found: LLM, inputs: ExpertInputs) -> float:
    """Squares of weights' errors, each times the mean square of its input."""
    total = 0.0
    for layer, expert in np.ndindex(inputs.num_rows.shape):
        pairs = zip(matrices(wanted, layer, expert), matrices(found, layer, expert), strict=True)
        for part, (exact, near) in enumerate(pairs):
            worth = torch.from_numpy(inputs.importance(layer, expert, part == 2)).double()
            total += float((worth[:, None] * (exact - near).square()).sum())
    return total


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_weighted_errors_are_less(
    model: Path, calibrated: Path, tmp_path: Path, dtype: str
) -> None:
    inputs = Calibration.load(calibrated).inputs
    assert inputs is not None
    options = {"context": 64, "dtype": "float32"}
    plain = pack(model, tmp_path / "plain", expert_dtype=dtype)
    packed = pack(model, tmp_path / "packed", expert_dtype=dtype, calibration=calibrated)
    with LLM(model, **options) as own, LLM(plain, **options) as one, LLM(packed, **options) as two:
        assert error_of(own, two, inputs) < error_of(own, one, inputs)


def test_a_trained_model_s_experts_answer_nearer_on_another_text(tmp_path: Path) -> None:
    text, path = held_out_text(), tmp_path / "c.lowtide"
    options: dict[str, Any] = {"context": 512, "dtype": "float32"}
    with LLM("demo:autoregressive", **options) as llm:
        half = len(text) // 2
        calibrate(llm, text[:half], "demo", inputs=True).save(path)
        ids = llm.token_ids(text[half:])[:400]
        _, rows = recorded(llm, lambda llm: llm.logits(ids))
        folder = engine_of(llm).facts.folder
        wanted = outputs_of(llm, rows)
    errors = {}
    for name, calibration in (("plain", None), ("calibrated", path)):
        packed = pack(folder, tmp_path / name, expert_dtype="q4", calibration=calibration)
        with LLM(packed, **options) as llm:
            found = outputs_of(llm, rows)
        errors[name] = sum(
            float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True)
        )
    assert errors["calibrated"] < 0.98 * errors["plain"]


def outputs_of(llm: LLM, rows: Rows) -> list[Tensor]:
    """Run each layer's experts on rows, all experts of a row alike in weight."""
    outputs = []
    for layer in range(llm.config.num_moe_layers):
        x, chosen = (each[:256] for each in rows.of(layer))
        routing = Routing(chosen, torch.full(chosen.shape, 1 / chosen.shape[1]))
        outputs.append(llm.run_experts(layer, x.float(), routing, STEP))
    return outputs


def test_another_model_s_are_refused(models: Path, calibrated: Path, tmp_path: Path) -> None:
    other = synth("qwen2_moe", "tiny", tmp_path / "other", seed=7)
    with pytest.raises(UsageError, match="another model's: of the same shape"):
        pack(other, tmp_path / "packed", "q4", calibration=calibrated)
    with pytest.raises(UsageError, match="another model's: of the same shape"):
        plan_model(other, context=64, format="q4", calibration=str(calibrated))
    with pytest.raises(UsageError, match="calibration is another model's"):
        pack(made(models, "qwen3_moe"), tmp_path / "packed", "q4", calibration=calibrated)
    assert not (tmp_path / "packed").exists()
    plan_model(other, context=64, calibration=str(calibrated))  # of policies it may be


def test_what_says_nothing_of_experts_is_refused(
    model: Path, calibrated: Path, tmp_path: Path
) -> None:
    with LLM(model, context=256) as llm:
        calibrate(llm, TOKEN_IDS, "m", num_pieces=4).save(tmp_path / "c")
    with pytest.raises(UsageError, match="no inputs of theirs"):
        pack(model, tmp_path / "packed", "q4", calibration=tmp_path / "c")
    with pytest.raises(UsageError, match="no experts are rounded"):
        pack(model, tmp_path / "packed", dense_dtype="q4", calibration=calibrated)
    assert not plan_model(
        model, context=64, format="q4", calibration=str(tmp_path / "c")
    ).formats.is_calibrated


def test_another_calibration_does_not_go_on_with_this_one_s(
    model: Path, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lowtide.model_writing.pack.whole_file", stop)
        with pytest.raises(KeyboardInterrupt):
            pack(model, tmp_path / "packed", "q4", calibration=calibrated)
    with pytest.raises(UsageError, match="not of this packing"):
        pack(model, tmp_path / "packed", "q4")
    pack(model, tmp_path / "packed", "q4", calibration=calibrated)


def test_beside_a_device_they_are_refused(model: Path) -> None:
    with LLM(model, context=256, device="emulated") as llm:
        with pytest.raises(UnsupportedError, match='`device="cpu"`'):
            calibrate(llm, TOKEN_IDS, "m", num_pieces=4, inputs=True)
        llm.generate(TOKEN_IDS[:5], PARAMS)


def test_the_verbs(model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "c.lowtide"
    text.write_text("some words to calibrate on " * 20, encoding="utf-8")
    arguments = ["calibrate", str(model), "--text", str(text), "--pieces", "4", "--context", "256"]
    arguments += ["--inputs", "--out", str(out)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.stderr
    [num_pairs] = re.findall(r"inputs of (\d+) pairs of row and", " ".join(shown.stdout.split()))
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    inputs = Calibration.load(out).inputs
    assert inputs is not None and int(num_pairs) == inputs.num_rows.sum()
    assert told["inputs"] == {"num_pairs": int(num_pairs), "num_unseen": inputs.num_unseen}
    folder = tmp_path / "packed"
    packing = ["pack", str(model), "--format", "q4", "--out", str(folder)]
    shown = CliRunner().invoke(app, [*packing, "--calibration", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "inputs_sha256" in (folder / "config.json").read_text()


# Read where experts are rounded, once, and counted where they are loaded


@pytest.fixture
def were_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of arrays of files, as they are read."""
    names: list[str] = []
    open_member = ZipFile.open

    def keep(archive: ZipFile, member: Any, *arguments: Any, **options: Any) -> Any:
        names.append(member.filename.removesuffix(".npy"))
        return open_member(archive, member, *arguments, **options)

    monkeypatch.setattr(ZipFile, "open", keep)
    return names


@pytest.mark.parametrize("format, num_reads", [("own", 0), ("q4", 1)])
def test_they_are_read_once_and_only_to_round_for(
    model: Path, calibrated: Path, were_read: list[str], format: str, num_reads: int
) -> None:
    LLM(model, context=64, format=format, calibration=str(calibrated)).close()
    assert were_read.count("inputs_hidden") == were_read.count("inputs_activated") == num_reads
    assert were_read.count("trace_ids") == were_read.count("trace_weights") == 1


def rows_of(opened: OpenModel) -> Sequence[FormatPlan]:
    planner = planner_of(opened)
    return format_plans.plan_by_format(opened.facts, opened.options.asked, planner)


@pytest.mark.parametrize("format", ["own", "q4"])
def test_each_format_s_plan_is_that_of_a_run_in_it(
    model: Path,
    calibrated: Path,
    were_read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    format: str,
) -> None:
    plans: dict[str | None, MemoryPlan] = {}

    def keep(opened: OpenModel, planner: Planner) -> MemoryPlan:
        name = opened.options.asked.format
        plans[name] = make_plan(opened, planner)
        return plans[name]

    monkeypatch.setattr(format_plans, "make_plan", keep)
    options: dict[str, Any] = {"context": 64, "calibration": str(calibrated), "device": "cpu"}
    rows = rows_of(open_model(model, EngineConfig(**options, format=format)))
    assert [row.format for row in rows] == list(plans) == ["own", "q8", "q4"]
    assert were_read.count("inputs_hidden") == 1
    for name, plan in plans.items():
        alone = plan_model(model, **options, format=name)
        assert (plan.overhead_bytes, plan.formats) == (alone.overhead_bytes, alone.formats)


def test_another_model_s_are_no_format_s(calibrated: Path, tmp_path: Path) -> None:
    other = synth("qwen2_moe", "tiny", tmp_path / "other", seed=7)
    opened = open_model(other, EngineConfig(context=64, calibration=str(calibrated)))
    assert [row.format for row in rows_of(opened)] == ["own"]
