"""`lowtide quality`: likelihoods against oracles, exact against exact, a policy that is not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common.glm4 import block_causal_mask
from family_models import write_model
from oracle import GOLDENS, load_oracle
from torch import Tensor
from typer.testing import CliRunner
from whole import no_more_threads

from lowtide.cli import plotting
from lowtide.cli.app import app
from lowtide.core import Facts, RoutedTokens
from lowtide.decode.forced import ForcedText
from lowtide.errors import PlanError, UsageError
from lowtide.lab import quality_plot, quality_scores
from lowtide.lab.quality import QualityReport, QualityWork, quality
from lowtide.lab.quality_scores import Estimate
from lowtide.lab.quality_settings import QualitySetting, grouped
from lowtide.lab.quality_text import Scope
from lowtide.lab.verbs.quality import parse_settings
from lowtide.model_folder.demo_tasks import held_out_text
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import register, unregister
from lowtide.policies.substitution import in_order

SCOPE = Scope(num_tokens=120, window_tokens=96, mask_ratios=(0.9, 0.3))
EXACT = [
    QualitySetting("tide"),
    QualitySetting("lru", residents=0.3),
    QualitySetting("tide", residents=0.0),
]


def some_ids(num_tokens: int = 500, vocab: int = 90) -> list[int]:
    return np.random.default_rng(1).integers(3, vocab, num_tokens).tolist()


def work(ids: list[int], repeats: int = 0) -> QualityWork:
    return QualityWork(ids, scope=SCOPE, repeats=repeats, max_tokens=4)


def loss_of(logits: Tensor, token_ids: list[int]) -> float:
    wanted = torch.tensor(token_ids)
    return float(torch.nn.functional.cross_entropy(logits.double(), wanted))


def check_exact(report: QualityReport) -> None:
    for row in report.rows:
        assert row.comparison is not None and row.passes is not None and not row.reason
        compared, zero = row.comparison, Estimate(0.0, 0.0)
        assert compared.kl == compared.loss_difference == compared.accuracy_difference == zero
        assert compared.agreement == Estimate(1.0, 0.0)
    shares = [row.resident_share for row in report.rows]
    assert shares[0] == 1 and shares[-1] == 0
    assert report.rows[-1].passes.per_pass("read_bytes") > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_the_perplexity_is_that_of_transformers_at_every_budget(
    tmp_path: Path, family: str
) -> None:
    changes = {"num_experts": 32} if family == "qwen3_moe" else {}
    model = write_model(family, 3, tmp_path / "model", **changes)
    report = quality(model.folder, EXACT, work(some_ids()), context=128)
    check_exact(report)
    assert report.sample is not None and report.rows[0].comparison is not None
    losses = []
    for text in report.sample.scored:
        first, ids = text.num_context + 1, list(text.token_ids)
        losses.append(loss_of(model.oracle(ids)[first - 1 : -1], ids[first:]))
    assert report.rows[0].comparison.loss.mean == pytest.approx(np.mean(losses), rel=1e-4)
    assert report.rows[0].comparison.perplexity == pytest.approx(
        math.exp(np.mean(losses)), rel=1e-3
    )


def test_the_masked_likelihood_of_blocks_is_that_of_a_direct_computation() -> None:
    oracle, mask_id, length = load_oracle(GOLDENS / "llada2-a"), 383, 32
    report = quality(GOLDENS / "llada2-a", EXACT, work(some_ids(vocab=380)), context=128)
    check_exact(report)
    for index, ratio in enumerate((0.9, 0.3)):
        losses: list[float] = []
        for text in report.sample.scored:
            losses += _block_losses(oracle, text, index, mask_id, length)
        found = report.rows[0].of_ratio[ratio].loss.mean
        assert found == pytest.approx(np.mean(losses), rel=1e-4)


def _block_losses(
    oracle: Any, text: ForcedText, index: int, mask_id: int, length: int
) -> list[float]:
    losses = []
    for start in range(text.num_context, len(text.token_ids), length):
        row = torch.tensor(text.token_ids[: start + length])
        hidden = np.flatnonzero(text.masks[index][start : start + length]) + start
        wanted = row[hidden].clone()
        row[hidden] = mask_id
        mask = block_causal_mask(0, len(row), length, torch.float32)
        with torch.inference_mode():
            logits = oracle(row[None], attention_mask=mask).logits[0, hidden]
        losses += torch.nn.functional.cross_entropy(
            logits.double(), wanted, reduction="none"
        ).tolist()
    return losses


@pytest.mark.parametrize("family", ["llada_moe", "dream"])
def test_the_masked_likelihood_of_whole_texts_is_that_of_a_direct_computation(
    tmp_path: Path, family: str
) -> None:
    model = write_model(family, 1, tmp_path / "model")
    settings = EXACT if family == "llada_moe" else [QualitySetting()]
    report = quality(model.folder, settings, work(some_ids(vocab=80)), context=128)
    if family == "llada_moe":
        check_exact(report)
    config = json.loads((model.folder / "config.json").read_text())
    for index, ratio in enumerate((0.9, 0.3)):
        losses = []
        for text in report.sample.scored:
            hidden = text.masks[index]
            logits = model.oracle(
                np.where(hidden, config["mask_token_id"], text.token_ids).tolist()
            )
            ids = np.asarray(text.token_ids)[hidden].tolist()
            losses.append(loss_of(logits[torch.from_numpy(hidden)], ids))
        found = report.rows[0].of_ratio[ratio].loss.mean
        assert found == pytest.approx(np.mean(losses), rel=1e-4)


def others(facts: Facts) -> RoutedTokens | None:
    """Every token's first expert is the lowest that it has not."""
    routing = facts.routing
    experts = routing.experts.copy()
    for row in experts:
        row[0] = next(i for i in range(len(facts.is_kept)) if i not in row)
    return in_order(experts, routing.weights)


@contextmanager
def lossy() -> Iterator[str]:
    made = replace(CATALOGUE["lru"], is_lossless=False, substitution=lambda s: others)
    register("toy", made)
    try:
        yield "toy"
    finally:
        unregister("toy")


def test_a_policy_that_changes_words_is_seen_and_timed_beside_the_exact_one(tmp_path: Path) -> None:
    model = write_model("qwen3_moe", 3, tmp_path / "model", num_experts=32)
    with lossy() as name:
        settings = [QualitySetting(name, residents=0.3)]
        assert [[s.policy for s in group] for group in grouped(settings)] == [["auto", name]]
        report = quality(model.folder, settings, work(some_ids(), repeats=2), context=128)
    exact, changed = report.rows
    assert exact.comparison is not None and changed.comparison is not None
    assert (exact.policy, changed.policy) == ("lowtide", name)
    assert exact.comparison.kl.mean == 0 < changed.comparison.kl.mean
    assert changed.comparison.agreement.mean < 1
    for row in report.rows:
        assert row.speed is not None and len(row.speed.turns) == 2 and row.tokens_per_s
    assert [point.is_best for point in quality_plot.points(report.rows)].count(True) >= 1
    assert json.loads(json.dumps(report.as_dict()))["rows"][1]["label"] == "toy, residents=0.3"


def test_what_cannot_run_is_a_row_and_a_reference_that_cannot_is_an_error() -> None:
    folder, ids = GOLDENS / "llada2-a", some_ids(vocab=380)
    settings = [QualitySetting("tide", residents=0.2), QualitySetting("resident", residents=0.2)]
    report = quality(folder, settings, work(ids), context=128)
    assert "too small" in report.rows[1].reason and report.rows[1].comparison is None
    assert report.as_dict()["rows"][1]["reason"] == report.rows[1].reason
    with pytest.raises((PlanError, UsageError), match="too small"):
        quality(folder, settings[::-1], work(ids), context=128)
    with pytest.raises(UsageError, match="no tokens"):
        quality(folder, settings, QualityWork(), context=128)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"max_tokens": 0}, "max_tokens must be"), ({"max_tokens": 100}, "100 new ones need")],
)
def test_answers_that_cannot_be_timed_are_refused_before_hours_of_scoring(
    changes: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = GOLDENS / "llada2-a", work(some_ids(vocab=380), repeats=1)
    monkeypatch.delattr("lowtide.lab.quality.LLM")
    with pytest.raises((UsageError, PlanError), match=said):
        quality(folder, EXACT, asked._replace(**changes), context=128)


def test_settings_from_text() -> None:
    found = parse_settings(["policy=lru residents=0.5 residents=0.25", "policy=tide tau=2 tau=8"])
    assert [setting.label for setting in found] == [
        "lru, residents=0.5",
        "lru, residents=0.25",
        "tide tau=2",
        "tide tau=8",
    ]
    [one] = parse_settings(["host_memory=1GiB expert_dtype=float32"])
    assert one.options == {"host_memory": "1GiB", "expert_dtype": "float32"}
    for text, said in (
        ("policy", "not NAME=VALUE"),
        ("=1", "not NAME=VALUE"),
        ("policy=none", "not known"),
        ("rho=3", "'rho' is not an option of a model, nor of the policy auto"),
        ("policy=tide tau=x", "tau"),
        ("residents=half", "expected a share"),
        ("residents=1.5", "from 0 to 1"),
        ("residents=1 host_memory=1GiB", "same thing"),
        ("context=5", "not an option of the model"),
        (" ".join(f"seed_{i}=1 seed_{i}=2" for i in range(12)), "option"),
    ):
        with pytest.raises(UsageError, match=said):
            parse_settings([text])
    with pytest.raises(UsageError, match="512 at most"):
        parse_settings(["policy=tide " + " ".join(f"tau={i}" for i in range(1, 514))])


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["quality", *arguments])


def test_the_command_prints_a_table_an_object_and_a_picture(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(held_out_text()[:8000])
    common = ["demo:chat", "--text", str(text), "--tokens", "60", "--window", "96"]
    common += ["--context", "256", "--setting", "policy=tide residents=0.5"]
    picture = tmp_path / "plots" / "new" / "pareto.png"  # whose folder is made
    done = run(*common, "--json", "--repeats", "0", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["label"] for row in found["rows"]] == ["auto", "tide, residents=0.5"]
    assert found["rows"][1]["text"]["kl"] == {"mean": 0.0, "error": 0.0}
    assert 1 < found["rows"][0]["text"]["perplexity"] < 1000
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = run(*common, "--repeats", "1", "--max-tokens", "4")
    assert table.exit_code == 0, table.output
    assert "perplexity" in table.stdout and "tide, residents=0.5" in table.stdout
    assert table.stdout.startswith("tide, residents=0.5 agrees with auto on 100% of tokens; ")


def test_a_text_of_one_huge_line_is_scored_and_one_beyond_the_limit_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os; " * 100_000)
    asked = ["demo:chat", "--text", str(text), "--tokens", "60", "--window", "96"]
    done = run(*asked, "--context", "256", "--repeats", "0", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"][0]["text"]["perplexity"] > 1
    monkeypatch.setattr("lowtide.cli.text_file.MAX_TEXT_BYTES", 10**6)
    done = run(*asked)
    assert done.exit_code == 2 and "more than 1000000 bytes; give a part" in done.stderr


def test_bad_input_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, latin, good = (tmp_path / name for name in ("short", "latin", "good"))
    short.write_text("a few words")
    latin.write_bytes(b"caf\xe9" * 100)
    good.write_text("import os\n" * 300)
    (tmp_path / "empty").touch()
    (tmp_path / "dir.png").mkdir()
    demo, golden = "demo:chat", str(GOLDENS / "llada2-a")
    cases: list[tuple[list[str], str]] = [
        ([demo, "--text", str(short)], "it takes 2 windows of at least 65 tokens"),
        ([demo, "--text", str(tmp_path / "empty")], "text is empty"),
        ([demo, "--text", str(latin)], "not in UTF-8"),
        ([demo, "--text", str(tmp_path / "none")], "cannot be read"),
        ([golden, "--text", str(good)], "no tokenizer.json"),
        ([golden], "Give --text FILE"),
        ([demo, "--text", str(good), "--mask-ratios", "0.5,x"], "expected a share"),
        ([demo, "--text", str(good), "--mask-ratios", "2"], "Mask ratios"),
        ([demo, "--text", str(good), "--tokens", "0"], "tokens must be"),
        ([demo, "--text", str(good), "--repeats", "-1"], "--repeats"),
        ([demo, "--text", str(good), "--plot", str(tmp_path / "a.gif")], ".png"),
        ([demo, "--text", str(good), "--plot", str(good / "no" / "a.png")], "cannot be written"),
        ([demo, "--text", str(good), "--plot", str(tmp_path / "dir.png")], "written"),
        ([demo, "--text", str(good), "--setting", "policy=what"], "not known"),
    ]
    for arguments, said in cases:
        done = run(*arguments)
        assert done.exit_code in (1, 2) and said in done.stderr, (arguments, done.output)
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    done = run(demo, "--text", str(good), "--plot", str(tmp_path / "a.png"))
    assert done.exit_code == 2 and "lowtide[plot]" in done.stderr


def test_ctrl_c_ends_it_with_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(quality_scores, "MAX_HELD_BYTES", 0)  # logits are kept in a file
    stages: list[str] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stage == "lru, residents=0.3" and done:
            raise KeyboardInterrupt

    folder, ids = GOLDENS / "llada2-a", some_ids(vocab=380)
    with no_more_threads(), pytest.raises(KeyboardInterrupt):
        quality(folder, EXACT[:2], work(ids), progress=interrupt, context=128)
    assert "tide" in stages
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
