"""The counts of `calibrate --buddies` are those of a slow direct count, and files keep them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buddy_counts import direct_profile, random_routing
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_calibrate import SHAPE, make_calibration, open_tiny

from lowtide import LLM
from lowtide.errors import UnsupportedError, UsageError
from lowtide.lab.buddies import CoActivations, EvenSample, needed_tokens, shares
from lowtide.lab.calibrate import (
    DIFFUSION,
    MIN_PIECE_TOKENS,
    Length,
    calibrate,
    check_length,
    learn,
    split,
)
from lowtide.model_writing.synth import synth
from lowtide.policies.buddy_profile import BuddyProfile, QualityCurve
from lowtide.replay.calibration import Calibration
from lowtide.replay.trace import TraceShape

TOKEN_IDS = np.random.default_rng(0).integers(3, 300, 160).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def same(a: BuddyProfile, b: BuddyProfile) -> bool:
    """To the bit."""
    for each in dataclasses.fields(BuddyProfile):
        one, other = getattr(a, each.name), getattr(b, each.name)
        if isinstance(one, QualityCurve) and isinstance(other, QualityCurve):
            is_same = one.text_sha256 == other.text_sha256 and np.array_equal(
                [one.mass, one.kl], [other.mass, other.kl]
            )
        elif isinstance(one, np.ndarray):
            is_same = np.array_equal(one, other) and one.dtype == other.dtype
        else:
            is_same = one == other
        if not is_same:
            return False
    return True


@examples(60)
@given(
    seed=st.integers(0, 10**6),
    num_experts=st.integers(3, 9),
    k=st.integers(2, 4),
    cuts=st.lists(st.integers(1, 39), max_size=4),
)
def test_counts_are_the_direct_ones(seed: int, num_experts: int, k: int, cuts: list[int]) -> None:
    k = min(k, num_experts)
    routed = random_routing(seed, 2, num_experts, k, 40)
    counts = CoActivations(TraceShape(2, num_experts, k))
    bounds = [0, *sorted(cuts), 40]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        for layer, (ids, weights) in enumerate(routed):
            counts.count(layer, ids[start:stop], weights[start:stop])
    found, wanted = counts.profile("00ff"), direct_profile(routed, num_experts)
    np.testing.assert_allclose(found.sample, wanted.sample, rtol=1e-6)
    assert same(dataclasses.replace(found, sample=wanted.sample), wanted)


@pytest.mark.parametrize("family", ["llada2", "qwen3_moe", "deepseek_v2", "llada_moe"])
def test_a_model_is_counted_as_its_trace_says(models: Path, family: str) -> None:
    """Autoregressive, block-diffusion and bidirectional: every row of every pass counts once."""
    with open_tiny(models, family) as llm:
        shape = TraceShape(*llm.config.moe_shape)
        counts = CoActivations(shape)
        prompts, _ = split(llm, TOKEN_IDS, 12)
        trace, _ = learn(llm, prompts[:1], family, beside=(counts,))
        profile = counts.profile(llm.fingerprint)
    assert profile.num_tokens == len(trace.ids)
    assert (profile.activations == trace.hits().sum(axis=0)).all()
    one_hot = np.zeros((*trace.ids.shape[:2], shape.num_experts), np.int64)
    np.put_along_axis(one_hot, trace.ids.astype(np.int64), 1, axis=2)
    together = np.einsum("rli,rlj->lij", one_hot, one_hot)
    together *= ~np.eye(shape.num_experts, dtype=bool)
    assert (profile.together == together).all()


def test_samples_are_even_and_bounded() -> None:
    for total in (0, 1, 7, 8, 9, 100, 1000):
        sample = EvenSample(8)
        for start in range(0, total, 3):
            sample.see(np.arange(start, min(start + 3, total)))
        assert len(sample) <= 8 and len(sample) >= min(total, 4)
        if total:
            kept = sample.rows(8)
            assert kept[0] == 0 and len(set(np.diff(kept).tolist())) <= 1
            assert total - kept[-1] <= max(1, 2 * total // len(kept))


def test_weights_are_shares_of_the_chosen() -> None:
    weights = np.array([[2.0, 6.0], [0.0, 0.0]], np.float32)
    assert shares(weights).tolist() == [[0.25, 0.75], [0.5, 0.5]]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_calibration_has_buddies_where_it_is_asked_for_them(
    models: Path, tmp_path: Path, family: str
) -> None:
    with open_tiny(models, family) as llm:
        calibration = calibrate(llm, TOKEN_IDS, "m", num_pieces=4, buddies=True)
        without = calibrate(llm, TOKEN_IDS[:40], "m", num_pieces=2)
        fingerprint = llm.fingerprint
    assert without.buddies is None and calibration.buddies is not None
    profile = calibration.buddies
    assert profile.fingerprint == fingerprint
    path = tmp_path / "c.lowtide"
    calibration.save(path)
    again = Calibration.load(path).buddies
    assert again is not None and same(profile, again)
    without.save(path)
    assert Calibration.load(path).buddies is None


def test_a_profile_is_of_its_weights_alone(models: Path, tmp_path: Path) -> None:
    with open_tiny(models, "mixtral") as llm:
        own = llm.fingerprint
        calibrate(llm, TOKEN_IDS, "m", num_pieces=4, buddies=True).save(tmp_path / "c")
    options = {"context": 256, "calibration": str(tmp_path / "c")}
    with LLM(models / "mixtral", dtype="bfloat16", **options) as llm:
        assert llm.fingerprint == own
    synth("mixtral", "tiny", tmp_path / "other", seed=7)
    with pytest.raises(UsageError, match="c is another model's: of the same shape and with other"):
        LLM(tmp_path / "other", **options)


def made() -> Calibration:
    """A calibration of `SHAPE` with all that a profile can have."""
    routed = random_routing(0, SHAPE.num_layers, SHAPE.num_experts, 2, 60)
    profile = direct_profile(
        routed,
        SHAPE.num_experts,
        curve=QualityCurve(np.array([0.1, 0.5]), np.array([0.0, 0.25]), "ab"),
    )
    return dataclasses.replace(make_calibration(), buddies=profile)


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    calibration, path = made(), tmp_path / "c.lowtide"
    calibration.save(path)
    again = Calibration.load(path)
    assert calibration.buddies is not None and again.buddies is not None
    assert same(calibration.buddies, again.buddies)
    with pytest.raises(UsageError, match="another model's"):
        again.buddies.check("0f", "c")
    curve = QualityCurve(np.array([0.2]), np.array([0.5]), "cd")
    again.with_curve(curve).save(path)
    kept = Calibration.load(path).buddies
    assert kept is not None and same(kept, dataclasses.replace(again.buddies, curve=curve))
    with pytest.raises(UsageError, match="--buddies"):
        make_calibration().with_curve(curve)


def facts(**changes: Any) -> Any:
    values = {"fingerprint": "00ff", "num_tokens": 60, "curve_text_sha256": "ab"}
    return np.frombuffer(json.dumps({**values, **changes}).encode(), np.uint8)


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": facts(num_tokens=61)},
        {"facts": facts(num_tokens="60")},
        {"facts": facts(more=1)},
        {"facts": np.frombuffer(b"[" * 9, np.uint8)},
        {"activations": np.zeros((3, 8), np.int64)},
        {"together": np.zeros((3, 8, 8), np.int32)},
        {"sample": np.full((3, 4, 2), 0.25, np.float32)},
        {"sample": np.tile(np.array([0.25, 0.75], np.float32), (3, 4, 1))},
        {"sample": np.full((3, 4), 0.5, np.float32)},
        {"curve": np.array([[0.5, 0.1], [0.1, 0.2]])},
        {"curve": np.array([[0.1, 0.5], [0.1, np.nan]])},
        {"curve": np.zeros((3, 2))},
        {"curve": np.zeros((2, 2), np.float32)},
        {"sample": None},
    ],
    ids=str,
)
def test_a_damaged_profile_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "c.lowtide"
    made().save(path)
    with np.load(path) as file:
        arrays = {**file, **{f"buddy_{name}": value for name, value in changes.items()}}
    with open(path, "wb") as out:
        np.savez(out, **{name: value for name, value in arrays.items() if value is not None})
    with pytest.raises(UsageError, match=r"c\.lowtide"):
        Calibration.load(path)


def test_buddies_of_another_shape_are_not_the_traces(tmp_path: Path) -> None:
    profile = direct_profile(random_routing(0, 2, SHAPE.num_experts, 2, 60), SHAPE.num_experts)
    dataclasses.replace(make_calibration(), buddies=profile).save(tmp_path / "c")
    with pytest.raises(UsageError, match="its buddies are of"):
        Calibration.load(tmp_path / "c")


def test_too_short_a_text_says_what_would_do() -> None:
    assert needed_tokens(TraceShape(4, 256, 8)) == 1166
    said = r"at least 1166 .* of 130 has 864 in 12 of 16 .* give 544 tokens .* --pieces 16\."
    with pytest.raises(UsageError, match=said):
        check_length(TraceShape(4, 256, 8), 130, 16, DIFFUSION)


def test_a_text_that_is_too_short_for_anything_is_told_what_buddies_take(models: Path) -> None:
    """Not what a calibration without them would: the next text would be too short once more."""
    with open_tiny(models, "qwen3_moe") as llm:
        for num_tokens, num_pieces in ((0, 4), (1, 4), (8, 2), (40, 1), (40, 0)):
            ids = TOKEN_IDS[:num_tokens]
            with pytest.raises(UsageError, match="Buddies of .* give [0-9]+ tokens") as told:
                calibrate(llm, ids, "m", num_pieces=num_pieces, buddies=True)
            tokens, pieces = asked_for(told.value)
            many = (TOKEN_IDS * (1 + tokens // len(TOKEN_IDS)))[:tokens]
            made = calibrate(llm, many, "m", num_pieces=pieces, buddies=True)
            assert made.buddies is not None
            with pytest.raises(UsageError, match="Buddies of"):
                calibrate(llm, many[: 8 * pieces - 1], "m", num_pieces=pieces, buddies=True)


def asked_for(told: UsageError) -> tuple[int, int]:
    """Tokens and pieces that a refusal names."""
    words = str(told).replace(".", " ").split()
    return int(words[words.index("give") + 1]), int(words[-1])


@examples(60)
@given(
    num_experts=st.integers(3, 300),
    k=st.integers(2, 8),
    num_pieces=st.integers(0, 40),
    num_tokens=st.integers(0, 8000),
    lengths=st.sampled_from([(256, 16), (64, 64), (20, 4), (3, 4)]),
)
def test_the_text_that_is_asked_for_does(
    num_experts: int, k: int, num_pieces: int, num_tokens: int, lengths: tuple[int, int]
) -> None:
    shape = TraceShape(2, num_experts, min(k, num_experts))

    def check() -> None:
        check_length(shape, num_tokens, num_pieces, Length(*lengths))

    try:
        check()
    except UsageError as told:
        num_tokens, num_pieces = asked_for(told)
        check()
    assert num_pieces >= 2 and num_tokens >= MIN_PIECE_TOKENS * num_pieces  # as `split` wants it


def test_one_expert_per_token_has_no_buddies() -> None:
    with pytest.raises(UnsupportedError, match="one expert each"):
        CoActivations(TraceShape(2, 8, 1))
    with pytest.raises(UsageError, match="No token was routed"):
        CoActivations(TraceShape(2, 8, 2)).profile("00")
