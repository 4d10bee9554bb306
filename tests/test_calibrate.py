"""Calibration: what is measured is what the model did, and what is read is what was written."""

from __future__ import annotations

import dataclasses
import importlib
import json
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common.synth_trace import synth_trace
from numpy.typing import NDArray
from policy_facts import COSTS
from torch import Tensor
from transformers import DeepseekV2ForCausalLM
from typer.testing import CliRunner
from whole import no_more_threads

from lowtide import LLM, SamplingParams
from lowtide.cli import plotting
from lowtide.cli.app import app
from lowtide.cli.screen import ProgressBars
from lowtide.core import Step, StepKind
from lowtide.errors import StorageError, UnsupportedError, UsageError
from lowtide.experts.rows import Routing
from lowtide.lab.calibrate import (
    AUTOREGRESSIVE,
    GateRecord,
    calibrate,
    foresee,
    learn,
    split,
    top_share,
)
from lowtide.lab.calibration_report import (
    check_plots,
    distinct_experts,
    plot,
    previous_step,
    step_similarity,
    token_share,
    weigh_budgets,
)
from lowtide.lab.gate_inputs import EarlyGates
from lowtide.lab.simulation.foresight import measured_accuracy
from lowtide.lab.simulation.simulator import simulate
from lowtide.model_writing.synth import synth
from lowtide.policies.prefetch import Gate
from lowtide.policies.recipe import PolicyInputs
from lowtide.record import recorded
from lowtide.replay.calibration import GATES, TOP_SIZES, Calibration, GateAccuracy, default_path
from lowtide.replay.trace import TraceShape, TraceWriter

SHAPE = TraceShape(3, 8, 2, 4, 6)
TOKEN_IDS = np.random.default_rng(0).integers(3, 300, 120).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def open_tiny(models: Path, family: str) -> LLM:
    folder = models / family
    if not folder.exists():
        synth(family, "tiny", folder)
    return LLM(folder, dtype="float32", context=256)


class Features:
    """Keeps what every layer's router was given and what it chose, pass by pass."""

    def __init__(self) -> None:
        self.passes: list[list[tuple[Tensor, Tensor]]] = []

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        if layer == 0:
            self.passes.append([])
        self.passes[-1].append((x.clone(), routing.experts.clone()))


def observe(llm: LLM, prompts: list[list[int]], num_new: int) -> Features:
    features = Features()
    with llm.observed(features):
        for prompt in prompts:
            llm.generate([prompt], SamplingParams(max_tokens=num_new, ignore_eos=True))
    return features


def residuals_of(features: Features) -> NDArray[np.float32]:
    """[layers - 1, hidden]."""
    layers = [torch.cat(rows).double() for rows in zip(*map(_inputs, features.passes), strict=True)]
    return torch.stack([(b - a).mean(0) for a, b in zip(layers, layers[1:], strict=False)]).numpy()


def _inputs(layers: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [x for x, _ in layers]


@pytest.mark.parametrize("family, num_new", [("llada2", 64), ("qwen3_moe", 16)])
def test_residuals_are_mean_differences_of_gate_inputs(
    models: Path, family: str, num_new: int
) -> None:
    with open_tiny(models, family) as llm:
        prompts, _ = split(llm, TOKEN_IDS, 4)
        trace, residual = learn(llm, prompts, family)
        features = observe(llm, prompts, num_new)
    assert residual.dtype == np.float32
    np.testing.assert_allclose(residual, residuals_of(features), atol=1e-5)
    assert [one.num_rows for one in trace.passes] == [len(p[0][0]) for p in features.passes]
    assert {one.step.kind for one in trace.passes} >= {
        StepKind.DENOISE if family == "llada2" else StepKind.DECODE
    }


def test_residuals_are_those_of_another_implementation(models: Path) -> None:
    with open_tiny(models, "deepseek_v2") as llm:
        prompts, _ = split(llm, TOKEN_IDS, 4)
        _, residual = learn(llm, prompts, "deepseek")
        first_layer = llm.config.moe.first_layer
        params = SamplingParams(max_tokens=AUTOREGRESSIVE.new_tokens, ignore_eos=True)
        answers = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    model = DeepseekV2ForCausalLM.from_pretrained(models / "deepseek_v2", dtype=torch.float32)
    seen: dict[int, list[Tensor]] = {}
    for layer in range(first_layer, len(model.model.layers)):
        hook = _keep(seen.setdefault(layer, []))
        model.model.layers[layer].mlp.register_forward_pre_hook(hook)
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            model(torch.tensor([prompt + answer[:-1]]))  # the last token is never fed
    layers = [torch.cat(rows).double() for rows in seen.values()]
    wanted = [(b - a).mean(0).numpy() for a, b in zip(layers, layers[1:], strict=False)]
    np.testing.assert_allclose(residual, wanted, atol=1e-5)


def _keep(rows: list[Tensor]) -> Any:
    return lambda module, arguments: rows.append(arguments[0].flatten(0, -2).clone())


def test_early_gates_are_the_next_routers(models: Path) -> None:
    with open_tiny(models, "olmoe") as llm:
        learning, testing = split(llm, TOKEN_IDS, 4)
        _, residual = learn(llm, learning, "olmoe")
        foresight = foresee(llm, testing, "olmoe", residual)
        features = observe(llm, testing, AUTOREGRESSIVE.new_tokens)
        weights = [router.weight for router in llm.routers]
    num_right, num_pairs = np.zeros((2, len(weights) - 1)), 0
    for index, layers in enumerate(features.passes):
        num_pairs += layers[0][1].numel()
        for layer, ((x, _), (_, experts)) in enumerate(zip(layers, layers[1:], strict=False)):
            for gate, shift in enumerate((0, torch.from_numpy(residual[layer]))):
                early = ((x + shift) @ weights[layer + 1].t()).topk(experts.shape[1]).indices
                counts = torch.bincount(early.reshape(-1), minlength=len(weights[0]))
                predicted = foresight.predicted[Gate(GATES[gate])][index]
                assert predicted[layer + 1].tolist() == counts.tolist()
                num_right[gate, layer] += (experts[:, :, None] == early[:, None]).sum()
    np.testing.assert_allclose(foresight.accuracy.routed, num_right / num_pairs, atol=1e-6)
    assert all(not counts[0].any() for counts in foresight.predicted[Gate.RAW])
    cosine = foresight.accuracy.cosine
    assert ((cosine[1] >= cosine[0] - 0.05) & (cosine <= 1 + 1e-6)).all()


@pytest.mark.parametrize(
    "family, overrides",
    [
        ("llada2", {}),
        ("llada2", {"expert_capacity": 12, "block_size": 8}),  # routes in windows
        ("deepseek_v2", {}),
        ("qwen2_moe", {}),
    ],
    ids=str,
)
def test_true_features_give_the_true_routing(
    models: Path, family: str, overrides: dict[str, int]
) -> None:
    open_tiny(models, family).close()
    options = {"dtype": "bfloat16", "context": 256, "config_overrides": overrides}
    with LLM(models / family, **options) as llm:
        prompts, _ = split(llm, TOKEN_IDS, 4)
        features = observe(llm, prompts[:1], AUTOREGRESSIVE.new_tokens)
        layers, step = llm.config.num_moe_layers, Step(StepKind.DECODE, 0)
        residual = np.zeros((layers - 1, llm.config.hidden_size), np.float32)
        for index in range(1, layers):
            gates = EarlyGates(llm, residual)
            for one in features.passes:
                x, experts = one[index]
                routing = Routing(experts, torch.empty(0))
                for layer in range(index + 1):  # as if features were the same from the first on
                    gates.saw_layer(layer, step, x, routing, x)
                for predicted in gates.predicted.values():
                    counts = torch.bincount(experts.reshape(-1), minlength=len(predicted[-1][0]))
                    assert predicted[-1][index].tolist() == counts.tolist()
            assert (gates.routed[:, index - 1] == 1).all()


def test_equal_texts_give_equal_calibrations(models: Path, tmp_path: Path) -> None:
    with open_tiny(models, "llada2") as llm:
        first, again = (calibrate(llm, TOKEN_IDS[:40], "m", num_pieces=2) for _ in range(2))
    assert same(first, again)
    assert not same(first, dataclasses.replace(again, residual=again.residual + 1))
    first.check("LLaDA2MoeModelLM", TraceShape(*llm.config.moe_shape))


def test_later_text_is_tested_on(models: Path) -> None:
    with open_tiny(models, "mixtral") as llm:
        learning, testing = split(llm, list(range(100)), 8)
        for text, num_pieces in ((list(range(15)), 2), (list(range(100)), 1), ([], 2)):
            with pytest.raises(UsageError, match=f"{len(text)} tokens"):
                split(llm, text, num_pieces)
    assert (len(learning), len(testing)) == (6, 2)
    assert learning[0] == list(range(12)) and testing == [
        list(range(72, 84)),
        list(range(84, 96)),
    ]


def test_ids_are_enough_without_a_tokenizer() -> None:
    golden = Path(__file__).parent / "goldens" / "llada2-a"
    with LLM(golden, context=128) as llm:
        with pytest.raises(UsageError, match=r"tokenizer\.json"):
            calibrate(llm, "text", "m")
        assert calibrate(llm, list(range(40)), "m", num_pieces=2).residual.shape == (2, 64)


def test_top_share_by_hand() -> None:
    hits = np.array([5, 0, 3, 3, 1])
    assert top_share(np.array([9, 0, 0, 0, 0]), hits, 1) == 1.0
    assert top_share(np.array([0, 9, 0, 0, 0]), hits, 1) == 0.0
    assert top_share(np.array([9, 0, 0, 8, 0]), hits, 2) == 1.0  # as many hits as expert 2
    assert top_share(np.array([9, 7, 0, 8, 0]), hits, 4) == 0.5  # two predicted of four
    assert top_share(hits, hits, 8) == 1.0


def make_calibration(seed: int = 0) -> Calibration:
    trace = synth_trace(SHAPE, num_blocks=2, steps_per_block=4, block_length=8, seed=seed)
    draw = np.random.default_rng(seed)
    return Calibration(
        architecture="SomeMoE",
        text_sha256="00ff",
        date="2026-01-02",
        trace=trace,
        residual=draw.normal(size=(2, 4)).astype(np.float32),
        frequency=(trace.hits() > 0).sum(axis=0).astype(np.float64),
        following=draw.random((2, 8, 8)),
        accuracy=GateAccuracy(draw.random((2, 2)), draw.random((2, 2, 4)), draw.random((2, 2))),
    )


def same(a: Calibration, b: Calibration) -> bool:
    facts = [(c.architecture, c.text_sha256, c.date, c.trace.passes, c.shape) for c in (a, b)]
    arrays = [[c.trace.ids, c.residual, c.frequency, c.following, *c.accuracy] for c in (a, b)]
    return facts[0] == facts[1] and all(map(np.array_equal, *arrays))


def test_a_calibration_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "c.lowtide"
    make_calibration().save(path)
    again = Calibration.load(path)
    assert same(make_calibration(), again)
    assert again.residual.dtype == np.float32
    assert list(path.parent.iterdir()) == [path]
    again.check("SomeMoE", SHAPE)
    with pytest.raises(UsageError, match="3 MoE layers of 8 .* 3 MoE layers of 9 experts"):
        again.check("SomeMoE", SHAPE._replace(num_experts=9))
    with pytest.raises(UsageError, match="another model's: 'SomeMoE'.*'Other'"):
        again.check("Other", SHAPE)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": np.array([2], np.int64)},
        {"trace_version": np.array([2], np.int64)},
        {"residual": np.zeros((2, 5), np.float32)},
        {"residual": np.zeros((2, 4), np.float64)},
        {"residual": np.full((2, 4), np.nan, np.float32)},
        {"frequency": np.zeros((3, 9))},
        {"frequency": np.full((3, 8), -1.0)},
        {"following": np.zeros((3, 8, 8))},
        {"routed": np.full((2, 2), 1.5)},
        {"top": np.zeros((2, 2, 3))},
        {"cosine": np.full((2, 2), -2.0)},
        {"facts": np.frombuffer(b"{", np.uint8)},
        {"facts": np.frombuffer(b"[]", np.uint8)},
        {"facts": np.frombuffer(b'{"architecture": 1, "text_sha256": "", "date": ""}', np.uint8)},
        {"trace_ids": np.zeros((1, 3, 2), np.uint16)},
        {"trace_shape": np.array([3, 8, 2, -4, 6], np.int64)},
        {"following": None},
        {"more": np.zeros(1)},
    ],
    ids=str,
)
def test_a_contradictory_calibration_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "c.lowtide"
    make_calibration().save(path)
    with np.load(path) as file:
        arrays = {**file, **changes}
    with open(path, "wb") as out:
        np.savez(out, **{name: value for name, value in arrays.items() if value is not None})
    with pytest.raises(UsageError, match=r"c\.lowtide"):
        Calibration.load(path)


def test_missing_traces_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent is missing"):
        Calibration.load(tmp_path / "absent")
    make_calibration().trace.save(tmp_path / "trace")
    with pytest.raises(UsageError, match="not a lowtide calibration that can be read"):
        Calibration.load(tmp_path / "trace")
    with pytest.raises(StorageError, match="cannot be written"):
        make_calibration().save(tmp_path / "trace" / "c.lowtide")


def test_every_model_has_a_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    places = {
        default_path(Path(folder), architecture, shape)
        for folder in ("a/model", "b/model")
        for architecture in ("One", "Two")
        for shape in (SHAPE, SHAPE._replace(num_layers=4))
    }
    assert len(places) == 8
    assert all(place.is_relative_to(tmp_path) and "model-" in place.name for place in places)


def test_steps_are_compared_by_hand() -> None:
    block = np.array([[[3, 4, 0]], [[3, 4, 0]], [[0, 0, 5]], [[4, 3, 0]]])
    assert step_similarity([block]) == pytest.approx([1.0, 0.0, 0.0])
    assert step_similarity([block], 3) == pytest.approx([24 / 25])
    assert step_similarity([block, block[:2]]) == pytest.approx([1.0, 0.0, 0.0])
    assert step_similarity([block[:1]]).shape == (0,)
    assert distinct_experts([block, block[2:]]).tolist() == [1.5, 2.0, 1.0, 2.0]


def test_budgets_are_weighed_by_the_tau_solvers() -> None:
    calibration = make_calibration()
    budgets = weigh_budgets(calibration, COSTS)
    assert [budget.num_residents for budget in budgets] == [2, 4, 6]
    for budget in budgets:
        assert 0 <= budget.drift <= 1 and 1 <= budget.paper_tau <= 3
        times = {
            tau: simulate(
                calibration.trace,
                "tide",
                PolicyInputs([budget.num_residents] * 3, 8, COSTS, options={"tau": tau}),
            ).total_s
            for tau in (1, 2, 3)
        }
        assert times[budget.auto_tau] == min(times.values())
    np.testing.assert_allclose(token_share(calibration).sum(axis=1), 1.0)


def test_the_simulator_takes_measured_gates() -> None:
    calibration = make_calibration()
    trace = calibration.trace
    setting = PolicyInputs([2] * 3, 8, COSTS)

    def wasted(**options: Any) -> int:
        return simulate(trace, "hybrimoe", setting, **options).prefetch.num_wasted

    perfect = {Gate.RAW: np.ones(2)}
    truth = {Gate.RAW: list(trace.hits())}
    # Who knows everything still wastes what the host then computes.
    least = wasted(gate_accuracy=perfect)
    assert wasted(predictions=truth) == least
    assert wasted(gate_accuracy=measured_accuracy(calibration)) > least
    assert wasted(predictions={Gate.RAW: list(np.roll(trace.hits(), 3, axis=2))}) > least
    with pytest.raises(ValueError, match="shorter"):
        simulate(trace, "hybrimoe", setting, predictions={Gate.RAW: []})


def test_plots_are_drawn_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = plot(make_calibration(), tmp_path / "plots")
    assert [file.read_bytes()[1:4] for file in files] == [b"PNG"] * 2
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        plot(make_calibration(), tmp_path / "file")
    taken = tmp_path / "taken" / "distinct-experts.png"
    taken.mkdir(parents=True)
    with pytest.raises(StorageError, match="distinct-experts.png cannot be written"):
        check_plots(taken.parent)
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"lowtide\[plot\]"):
        plot(make_calibration(), tmp_path)


def test_how_well_a_step_names_the_next() -> None:
    writer = TraceWriter("m", TraceShape(1, 8, 2))
    for index, rows in enumerate(([[0, 1], [0, 2]], [[0, 1], [0, 3]], [[4, 5], [4, 6]])):
        writer.append(Step(StepKind.DENOISE, index), 0, np.array(rows)[:, None])
    # Expert 0 twice, then again, then not; of two, 0 and one of those with one token, then none.
    tops = previous_step(writer.trace())
    np.testing.assert_allclose(tops, [[0.5, 0.5, (2 / 3) / 2, (2 / 3) / 2]])
    empty = TraceWriter("m", TraceShape(1, 8, 2))
    empty.append(Step(StepKind.PREFILL, 0), 0, np.array([[[0, 1]]]))
    assert not previous_step(empty.trace()).any()


def test_the_command(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("some words to calibrate on " * 20, encoding="utf-8")
    with open_tiny(models, "qwen3_moe") as llm:
        shape = TraceShape(*llm.config.moe_shape)
        llm_trace = tmp_path / "run.trace"
        with recorded(llm, llm_trace, "m"):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    model = models / "qwen3_moe"
    arguments = ["calibrate", str(model), "--text", str(text), "--pieces", "4", "--context", "256"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--plot", str(tmp_path / "plots")])
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert Path(answer["path"]) == default_path(model, "Qwen3MoeForCausalLM", shape)
    calibration = Calibration.load(Path(answer["path"]))
    calibration.check("Qwen3MoeForCausalLM", shape)
    assert answer["gates"]["residual"]["routed"] == calibration.accuracy.routed[1].tolist()
    last = previous_step(calibration.trace)
    assert answer["previous_step"]["top_2"] == last[:, 1].tolist() and 0 < last.mean() <= 1
    assert [len(answer["budgets"]), len(answer["plots"])] == [3, 2]
    out = tmp_path / "c.lowtide"
    shown = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert shown.exit_code == 0 and out.exists()
    assert "residual gate" in shown.stdout and "previous step" in shown.stdout
    assert "which experts of" in shown.stdout and f"--calibration {out}" in shown.stdout
    replay = ["simulate", str(llm_trace), "--calibration", str(out), "--policy", "dali,fiddler"]
    result = CliRunner().invoke(app, [*replay, "--json"])
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["runs"]) == 2


def test_ctrl_c_leaves_the_calibration_that_was(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real signals, once in the middle of each stage."""
    open_tiny(models, "qwen3_moe").close()
    text, out = tmp_path / "text.txt", tmp_path / "c.lowtide"
    text.write_text("some words to calibrate on " * 20, encoding="utf-8")
    make_calibration().save(out)
    earlier = out.read_bytes()
    command = ["calibrate", str(models / "qwen3_moe"), "--text", str(text), "--pieces", "4"]
    command += ["--context", "256", "--out", str(out)]
    stages: set[str] = set()

    def interrupt(bars: ProgressBars, stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages.add(stage)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressBars, "__call__", interrupt)
    num_stages = -1
    while len(stages) > num_stages:
        num_stages = len(stages)
        with no_more_threads():
            result = CliRunner().invoke(app, command)
        assert result.exit_code == (130 if len(stages) > num_stages else 0), result.output
        assert (out.read_bytes() == earlier) == (result.exit_code == 130)
    assert num_stages >= 3  # loading, learning, foreseeing
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_calibrated_is_refused(models: Path, tmp_path: Path) -> None:
    open_tiny(models, "qwen3_moe").close()
    model = str(models / "qwen3_moe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "short").write_text("a", encoding="utf-8")
    for arguments, reason in (
        ([], "--text"),
        (["--text", str(tmp_path / "absent")], "No such file"),
        (["--text", str(tmp_path / "bytes")], "UTF-8"),
        (["--text", str(tmp_path / "short")], "16 pieces"),
        (["--text", str(tmp_path / "short"), "--machine", "abacus"], "abacus"),
        # Told before the text is run, which is too short.
        (["--text", str(tmp_path / "short"), "--out", str(tmp_path)], "cannot be written"),
        (["--text", str(tmp_path / "short"), "--out", "/dev/null/c"], "cannot be written"),
        (
            ["--text", str(tmp_path / "short"), "--plot", "/dev/null/c"],
            "Plot /dev/null/c/step-similarity.png cannot be written",
        ),
    ):
        result = CliRunner().invoke(app, ["calibrate", model, *arguments])
        assert result.exit_code in (1, 2)
        assert result.stderr.startswith("lowtide: ") and reason in result.stderr


def test_the_benchmark_ranks_predictors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    prefetch = importlib.import_module("prefetch")
    known, out = make_calibration(), tmp_path / "out"
    truth = list(known.trace.hits())
    predicted = {Gate.RAW: truth, Gate.RESIDUAL: [np.roll(hits, 1, axis=1) for hits in truth]}
    found = GateRecord(known.trace, predicted, known.accuracy)
    monkeypatch.setattr(prefetch, "LLM", lambda model: nullcontext())
    monkeypatch.setattr(prefetch, "text_for", lambda name: "")
    monkeypatch.setattr(prefetch, "split", lambda llm, text, num: ([[0]] * num, [[0]] * num))
    monkeypatch.setattr(prefetch, "learn", lambda *_: (known.trace, known.residual))
    monkeypatch.setattr(prefetch, "foresee", lambda *_: found)
    monkeypatch.setattr(sys, "argv", ["prefetch.py", "--model", "any", "--out", str(out)])
    prefetch.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    shares = {
        row["predictor"]: [row[f"top_{n}"] for n in TOP_SIZES]
        for row in rows
        if row["what"] == "accuracy"
    }
    assert shares.keys() == prefetch.PREDICTORS.keys()
    assert shares["raw gate"] == pytest.approx([1.0] * 4)
    assert all(0 <= min(tops) <= max(tops) <= 1 for tops in shares.values())
    assert shares["residual gate"][0] < 1
