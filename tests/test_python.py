"""The Python interface: names, keywords, prompts of every kind, texts of events."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import json
import pickle
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_folder import templated_demo
from programs import python

import lowtide
from lowtide import LLM, AsyncLLM, DiffusionParams, SamplingParams, plan_model
from lowtide.answers.completion import Completion, Usage
from lowtide.answers.progress_line import FIRST_AFTER_S, ProgressLine
from lowtide.decode.intake import sample_seed
from lowtide.decode.request import Committed, Draft, Finished
from lowtide.engine.opening.config import EngineConfig
from lowtide.errors import LowtideError, PlanError, UsageError
from lowtide.params import with_keywords

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if loud %}!{% endif %}assistant:"
)
TALK = [{"role": "user", "content": "def f(x):"}]


@pytest.fixture(scope="module", params=["diffusion", "autoregressive"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(f"demo:{request.param}", context=256, dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The demo with another chat template."""
    folder = templated_demo(tmp_path_factory.mktemp("chatty"), TEMPLATE)
    with LLM(folder, context=256, dtype="float32") as llm:
        yield llm


# names


def test_every_name_is_listed_and_there() -> None:
    assert set(dir(lowtide)) == set(lowtide.__all__)
    for name in lowtide.__all__:
        assert lowtide.__dict__.get(name) is not None or getattr(lowtide, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = lowtide.nothing  # type: ignore[attr-defined]


def test_looking_around_imports_no_torch() -> None:
    code = (
        "import lowtide, sys; dir(lowtide); lowtide.SamplingParams; print('torch' in sys.modules)"
    )
    done = python("-c", code, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_options_are_keywords_with_the_engines_defaults(kind: type[Any]) -> None:
    keywords = {
        name: one.default
        for name, one in inspect.signature(kind).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }
    mappings = {"device_options", "policy_options", "config_overrides"}
    defaults = dataclasses.asdict(EngineConfig()) | dict.fromkeys(mappings)
    assert keywords == defaults


def test_a_mapping_that_is_none_is_empty() -> None:
    config = EngineConfig(policy_options=None, config_overrides=None)  # type: ignore[arg-type]
    assert config == EngineConfig()


def test_a_keyword_takes_the_place_of_a_field() -> None:
    params = SamplingParams(max_tokens=9, top_k=3, diffusion=DiffusionParams(steps=2))
    made = with_keywords(params, {"max_tokens": 5, "stop": "x", "threshold": 0.5})
    diffusion = DiffusionParams(steps=2, threshold=0.5)
    assert made == SamplingParams(max_tokens=5, top_k=3, stop="x", diffusion=diffusion)
    assert made.stop_strings == ("x",) and with_keywords(None, {}) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_new_tokens", "called max_tokens here"),
        ("num_predict", "called max_tokens here"),
        ("do_sample", "temperature"),
        ("num_return_sequences", "called n here"),
        ("sampling_params", "called params here"),
        ("stop_sequences", "called stop here"),
        ("temprature", "Did you mean temperature"),
    ],
)
def test_what_others_call_otherwise_is_told(name: str, said: str, llm: LLM) -> None:
    with pytest.raises(UsageError, match=said):
        llm.generate("x", **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu_memory_utilization", "gpu_memory"),
        ("max_model_len", "called context here"),
        ("n_ctx", "called context here"),
        ("torch_dtype", "called dtype here"),
        ("trust_remote_code", "no code"),
        ("revision", "org/name@revision"),
        ("host_memroy", "Did you mean host_memory"),
    ],
)
def test_options_that_others_have_are_told(name: str, said: str) -> None:
    for ask in (LLM, AsyncLLM, plan_model):
        with pytest.raises(UsageError, match=said):
            ask("demo:chat", **{name: 1})  # type: ignore[operator]


# prompts


def test_ids_may_be_a_list_or_an_array(llm: LLM) -> None:
    ids = llm.token_ids("def f(x):")
    [expected] = llm.generate(ids, max_tokens=6)
    for prompt in (tuple(ids), np.array(ids), np.array(ids, np.int32), torch.tensor(ids)):
        assert llm.generate(prompt, max_tokens=6) == [expected]
        assert torch.equal(llm.logits(prompt), llm.logits(ids))
    rows = np.array([ids, ids])
    for prompts in (rows, torch.tensor(rows), [ids, torch.tensor(ids)]):
        assert [c.token_ids for c in llm.generate(prompts, max_tokens=6)] == [
            expected.token_ids,
            expected.token_ids,
        ]


def test_what_is_no_prompt_is_refused_in_words_that_say_so(llm: LLM) -> None:
    ids = llm.token_ids("abc")
    cases: list[tuple[Any, Any, str]] = [
        (llm.logits, "abc", "not the text 'abc'"),
        (llm.logits, [ids, ids], "one text at a time"),
        (llm.logits, np.zeros((2, 2), np.int64), "one text at a time"),
        (llm.stream, ["a", "b"], "list of 2"),
        (llm.stream, ["a"], "list of 1"),
        (llm.stream, [ids, ids], "list of 2"),
        (llm.generate, np.zeros(3), "not float64 in 1"),
        (llm.generate, torch.zeros(2, 2, 2, dtype=torch.int64), "not torch.int64 in 3"),
        (llm.generate, {"input_ids": ids}, "give what it has under 'input_ids'"),
        (llm.generate, TALK[0], "put it in a list"),
        (llm.generate, b"abc", "not bytes"),
        (llm.generate, 5, "not int"),
        (llm.generate, [1.5], "not float"),
        (llm.generate, [[1], None], "not NoneType"),
        (llm.generate, torch.tensor([[True]]), "not torch.bool in 2"),
        (llm.generate, [True], "True is not one of 0 to"),
        (llm.chat, TALK[0], "in a list"),
        (llm.chat, [5, 6], "not int"),
    ]
    for ask, prompt, said in cases:
        with pytest.raises(UsageError) as error:
            ask(prompt)
        assert said in str(error.value)
    with pytest.raises(UsageError, match="SamplingParams or a list"):
        llm.generate(["a"], {"temperature": 0}, max_tokens=3)  # type: ignore[arg-type]


def test_chat_and_generate_apply_the_template(chatty: LLM) -> None:
    ids = chatty.token_ids(TALK)
    assert ids == chatty.tokenizer.encode("user: def f(x):\nassistant:", add_special=False)  # type: ignore[union-attr]
    [expected] = chatty.generate(ids, max_tokens=6)
    said = TALK[0]["content"]
    for [found] in (chatty.chat(TALK, max_tokens=6), chatty.generate(said, max_tokens=6)):
        assert found.token_ids == expected.token_ids
        assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    both = chatty.chat([TALK, TALK], SamplingParams(max_tokens=6))
    assert [c.token_ids for c in both] == [expected.token_ids] * 2
    [raw] = chatty.generate(said, raw=True, max_tokens=6)
    assert raw.usage.prompt_tokens < expected.usage.prompt_tokens
    [loud] = chatty.chat(TALK, template_options={"loud": True}, max_tokens=1)
    assert loud.usage.prompt_tokens > expected.usage.prompt_tokens
    assert chatty.has_chat_template


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    with LLM(templated_demo(tmp_path, None), context=64) as llm:
        for talk in ("hello", ["hello"], TALK):
            with pytest.raises(UsageError, match="no chat template"):
                llm.chat(talk)  # type: ignore[arg-type]


# several answers


def test_n_answers_come_prompt_by_prompt_each_with_a_seed_of_its_own(llm: LLM) -> None:
    wishes: Any = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    prompts = ["def f(", "class A"]
    several = [c.token_ids for c in llm.generate(prompts, n=3, seed=5, **wishes)]
    single = [c.token_ids for c in llm.generate(prompts, seed=5, **wishes)]
    assert len(several) == 6 and [several[0], several[3]] == single
    for place, answer in enumerate(several):
        prompt, sample = divmod(place, 3)
        seed = sample_seed(5 + prompt, sample)
        assert llm.generate(prompts[prompt], seed=seed, **wishes)[0].token_ids == answer
    assert len({tuple(answer) for answer in several[:3]}) > 1


def test_seeds_of_samples_differ() -> None:
    seeds = [sample_seed(seed, sample) for seed in range(30) for sample in range(30)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("n", [0, -1, 1025, 1.0, True])
def test_a_count_of_answers_that_cannot_be(n: Any) -> None:
    with pytest.raises(UsageError, match="n must be"):
        SamplingParams(n=n)


# texts of events


@pytest.mark.parametrize("stop", [(), "return", [" = ", "("]])
def test_texts_of_events_are_the_answers(llm: LLM, stop: Any) -> None:
    wishes: Any = {"max_tokens": 20, "temperature": 0.9, "seed": 3, "stop": stop, "n": 2}
    events = list(llm.stream("def naïve(x):\n    '''€ 5", **wishes))
    completions = llm.generate("def naïve(x):\n    '''€ 5", **wishes)
    for place, completion in enumerate(completions):
        own = [event for event in events if event.request == place]
        assert "".join(event.text for event in own) == completion.text
        tokens = [t for event in own if isinstance(event, Committed) for t in event.tokens]
        assert tokens == completion.token_ids
        assert isinstance(own[-1], Finished)


def test_on_event_sees_texts_too(llm: LLM) -> None:
    seen: list[Any] = []
    [completion] = llm.generate("def f(", max_tokens=12, on_event=seen.append)
    assert "".join(event.text for event in seen) == completion.text


# what is shown


def test_what_is_shown_of_a_model_a_plan_and_an_answer(llm: LLM) -> None:
    plan = llm.plan
    assert repr(llm).startswith("LLM('demo:") and f"policy {plan.policy}" in repr(llm)
    assert "expert slots" in repr(plan) and plan.reason in repr(plan)
    assert len({len(line) for line in repr(plan).splitlines()[1:8]}) == 1  # columns
    html = plan._repr_html_()
    assert html.startswith("<table>") and html.count("<tr>") == 8
    [completion] = llm.generate("Sort 31 20 55", max_tokens=4)
    assert str(completion) == completion.text
    assert repr(completion).endswith("4 tokens, length)")


def test_long_answers_and_answers_without_text_are_shown_short() -> None:
    usage = Usage(1, 100, 9)
    text = repr(Completion(list(range(100)), "<b>" * 50, "stop", usage))
    assert len(text) < 100 and "..." in text
    ids = repr(Completion(list(range(100)), "", "stop", usage))
    assert ids == "Completion([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...], 100 tokens, stop)"
    draft = Draft(0, 32, (7,) * 32, (True,) * 12 + (False,) * 20, 3, 32)
    assert repr(draft) == "Draft(request 0, block at 32, 12 of 32 masked)"
    assert repr(Committed(0, (1, 2), text="hi")) == "Committed(request 0, 2 tokens, 'hi')"
    assert repr(Finished(0, (1, 2), "stop", 2)) == "Finished(request 0, 2 tokens, stop, '')"


def test_progress_is_a_line_that_is_gone_at_the_end() -> None:
    now_s, out = 0.0, io.StringIO()
    with ProgressLine(2, out, clock=lambda: now_s) as line:
        line(Committed(0, (1, 2)))
        assert not out.getvalue()
        now_s = FIRST_AFTER_S + 1.5
        line(Finished(0, (1, 2), "stop", 2))
        assert out.getvalue() == "\r1/2 answers, 2 tokens, 1.0 tokens/s, 2 s left"
    screen = out.getvalue().split("\r")
    assert screen[-1] == "" and not screen[-2].strip() and len(screen[-2]) == len(screen[1])


def test_loading_is_shown_where_it_is_watched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FIRST_AFTER_S", "MIN_FRAME_S"):
        monkeypatch.setattr(f"lowtide.answers.progress_line.{name}", 0.0)

    def shown(**options: Any) -> str:
        with LLM("demo:autoregressive", context=64, **options):
            return capsys.readouterr().err

    assert not shown() and "100%\r" in shown(progress=True).replace(" ", "")
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert "MiB" in shown() and not shown(progress=False)
    told: list[Any] = []
    assert not shown(progress=lambda *facts: told.append(facts)) and told
    with pytest.raises(LowtideError):
        LLM("demo:autoregressive", context=64, host_memory="1MiB")
    assert not capsys.readouterr().err


def test_progress_is_shown_where_it_is_watched(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowtide.answers.progress_line.FIRST_AFTER_S", 0.0)
    llm.generate(["a = ", "b = "], max_tokens=3)
    assert not capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    llm.generate("a = ", max_tokens=3)
    llm.generate(["a = ", "b = "], max_tokens=3, progress=False)
    assert not capsys.readouterr().err
    llm.generate(["a = ", "b = "], max_tokens=3)
    assert "/2 answers" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_in_no_file(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.answers.progress_line.FIRST_AFTER_S", 0.0)
    for file in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", file)
        llm.generate(["a = ", "b = "], max_tokens=3)
        assert ("/2 answers" in file.getvalue()) == file.isatty()


def test_everything_that_is_raised_is_a_lowtide_error() -> None:
    with pytest.raises(LowtideError):
        LLM("no/such/model", offline=True)
    for name, said in (
        ("temperture", "Did you mean temperature"),
        ("max_new_tokens", "called max_tokens here"),
        ("steps", r"diffusion=DiffusionParams\(steps=...\)"),
    ):
        with pytest.raises(LowtideError, match=f"SamplingParams has no field .*{said}"):
            SamplingParams(**{name: 3})  # type: ignore[arg-type]
    with pytest.raises(LowtideError, match="Did you mean steps"):
        DiffusionParams(step=3)  # type: ignore[call-arg]
    assert json.dumps(lowtide.__version__)


def test_numbers_of_an_array_are_taken_as_python_s() -> None:
    made = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.uint64(7),  # type: ignore[arg-type]
        diffusion=DiffusionParams(steps=np.int32(4)),  # type: ignore[arg-type]
    )
    plain = SamplingParams(max_tokens=3, temperature=0.5, seed=7)
    assert made == dataclasses.replace(plain, diffusion=DiffusionParams(steps=4))
    assert type(made.max_tokens) is type(made.seed) is type(made.diffusion.steps) is int
    assert type(made.temperature) is float
    for wrong in (np.float32(3), np.float64("nan")):
        with pytest.raises(UsageError, match="max_tokens"):
            SamplingParams(max_tokens=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        np.bool_(True),
        np.array(True),
        torch.tensor(True),
        torch.tensor([1, 2]),
        torch.empty((), dtype=torch.int64, device="meta"),
        Fraction(10**400),
        10**400,
        10**5000,
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_what_only_looks_like_a_number_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="max_tokens must be an integer"):
        SamplingParams(max_tokens=wrong)
    with pytest.raises(UsageError, match="temperature must be a number"):
        SamplingParams(temperature=wrong)
    with pytest.raises(UsageError, match="context must be an integer"):
        EngineConfig(context=wrong)


def test_no_stop_may_be_said() -> None:
    assert SamplingParams(stop=None).stop_strings == ()
    for wrong in (0, False, "", [""], [1]):
        with pytest.raises(UsageError, match="stop"):
            SamplingParams(stop=wrong)  # type: ignore[arg-type]


def test_the_largest_seed_is_taken_for_several_prompts(llm: LLM) -> None:
    most = SamplingParams(seed=2**63 - 1, temperature=1.0, max_tokens=4)
    both = llm.generate(["a", "b"], most)
    assert both[1].token_ids == llm.generate("b", most, seed=0)[0].token_ids


def test_a_model_is_neither_pickled_nor_copied_and_what_it_gives_is(llm: LLM) -> None:
    for taken in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="neither pickled nor copied"):
            taken(llm)
    given = (llm.plan, SamplingParams(stop=["a"]), llm.generate("a", max_tokens=2))
    assert pickle.loads(pickle.dumps(given)) == given


def test_too_long_a_text_speaks_of_no_answer(llm: LLM) -> None:
    with pytest.raises(PlanError, match="A text of 300 tokens does not fit: the context is"):
        llm.logits([1] * 300)
