"""The model's own manners: sampling that its publisher names, thoughts apart, texts as chats."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lowtide import LLM, SamplingParams
from lowtide.cli.app import app
from lowtide.cli.live import LiveView
from lowtide.cli.prompt import think_options
from lowtide.cli.text import TextWriter
from lowtide.config.sampling import PublishedSampling, read_sampling
from lowtide.decode.request import Request
from lowtide.errors import ConfigError, UsageError
from lowtide.model_folder.tokenizer import TextStream
from lowtide.model_writing.synth import synth
from lowtide.params import with_published
from lowtide.parsing import has_thoughts, parser_of
from lowtide.parsing.answer_pieces import pieces_of, with_stop_test
from lowtide.parsing.pieces import Reasoning, Text, joined

OWN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, whose publisher would have tokens drawn."""
    made = synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("manners") / "model", seed=2)
    (made / "generation_config.json").write_text(json.dumps(OWN))
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, context=256, dtype="float32", cache="off") as made:
        yield made


# sampling


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, PublishedSampling()),
        ({"temperature": 0.6}, PublishedSampling()),
        (OWN, PublishedSampling(0.6, 20, 0.95)),
        ({"do_sample": True}, PublishedSampling(1.0)),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, PublishedSampling(1.0)),
        ({"repetition_penalty": 1.05}, PublishedSampling(repetition_penalty=1.05)),
        ({"repetition_penalty": 1.0, "do_sample": False}, PublishedSampling()),
    ],
)
def test_what_a_publisher_names(generation: dict[str, object], expected: object) -> None:
    assert read_sampling(generation) == expected


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 3}, {"min_p": True}])
def test_a_value_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    [name] = wrong
    with pytest.raises(ConfigError, match=f"generation_config.json: {name} .* must be a number"):
        read_sampling({"do_sample": True, **wrong})


def test_unset_fields_are_the_model_s_and_others_the_user_s() -> None:
    published = PublishedSampling(0.6, 20, 0.95, repetition_penalty=1.1)
    assert with_published(SamplingParams(), published) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1
    )
    hot = with_published(SamplingParams(temperature=2.0, top_k=5), published)
    assert (hot.temperature, hot.top_k, hot.top_p) == (2.0, 5, 0.95)
    off = SamplingParams(top_k=0, top_p=1, min_p=0, repetition_penalty=1)
    assert with_published(off, published) == replace(off, temperature=0.6)
    greedy = with_published(SamplingParams(temperature=0), published)
    assert greedy == SamplingParams(temperature=0, repetition_penalty=1.1)


def test_answers_are_drawn_as_the_model_s_files_say(llm: LLM) -> None:
    [own] = llm.generate([[5, 6, 7]], max_tokens=20, ignore_eos=True)
    own_by_hand = SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=0.6, top_k=20, top_p=0.95
    )
    [by_hand] = llm.generate([[5, 6, 7]], own_by_hand)
    [greedy] = llm.generate([[5, 6, 7]], max_tokens=20, ignore_eos=True, temperature=0)
    assert own.token_ids == by_hand.token_ids != greedy.token_ids


def test_filters_that_have_no_effect_are_told(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            llm.generate([[5]], max_tokens=1, temperature=0, top_p=0.90625)  # as no other test
        llm.generate([[5]], max_tokens=1, top_p=0.90625)
        llm.generate([[5]], max_tokens=1, temperature=0)
    [record] = caplog.records
    assert "`top_p` 0.90625: no effect at temperature 0" in record.getMessage()


# texts


def test_a_text_is_what_a_user_says_in_every_way_of_asking(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi you"}]
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    wishes: Any = {"max_tokens": 6, "temperature": 0}
    raw = llm.token_ids("hi you", raw=True)
    assert llm.token_ids("hi you") == llm.token_ids(talk) != raw
    one, other = llm.chat(["hi you", talk], **wishes)
    assert one.token_ids == other.token_ids
    [as_it_is] = llm.generate("hi you", raw=True, **wishes)
    assert as_it_is.usage.prompt_tokens == len(raw)
    in_parts = llm.token_ids([{"role": "user", "content": parts}])
    assert in_parts == llm.token_ids("hi\nyou")
    events = list(llm.stream("hi you", raw=True, **wishes))
    assert events[-1].token_ids == tuple(as_it_is.token_ids)


def test_parts_that_are_no_text_are_refused(llm: LLM) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(UsageError, match="Message 0 has a part .*image_url.*; only text is read"):
        llm.chat([{"role": "user", "content": [image]}])


# the command line


def test_sampling_and_a_cut_answer_are_told(folder: Path) -> None:
    asked = ["generate", str(folder), "-p", "hi", "--context", "128"]
    done = CliRunner().invoke(app, [*asked, "--max-tokens", "3"])
    assert done.exit_code == 0
    assert "generation_config.json says: temperature 0.6, top_k 20, top_p 0.95" in done.stderr
    assert "--temperature 0 takes the likeliest token" in done.stderr
    assert "(cut at 3 tokens)" in done.stderr
    done = CliRunner().invoke(app, [*asked, "--temperature", "0", "--ignore-eos", "--json"])
    answer = json.loads(done.stdout)
    num_prompt = answer["usage"]["prompt_tokens"]
    assert num_prompt + len(answer["token_ids"]) == 128
    assert "generation_config" not in done.stderr
    done = CliRunner().invoke(app, [*asked, "--no-think"])
    assert done.exit_code == 2 and "chat template has no enable_thinking" in done.stderr


# thoughts


class Letters:
    """A tokenizer of characters and of the tokens that mark thoughts."""

    def __init__(self, *marks: str) -> None:
        self._marks = {name: 1000 + i for i, name in enumerate(marks)}
        self.special_texts: dict[int, str] = {}

    def token_id(self, text: str) -> int | None:
        return self._marks.get(text)

    def encode(self, text: str) -> list[int]:
        for name, mark in self._marks.items():
            text = text.replace(name, chr(mark))
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(chr(i) for i in ids if i < 1000)

    def stream(self) -> TextStream:
        return TextStream(self)  # type: ignore[arg-type]

    def template_names(self, variable: str) -> bool:
        return variable == "enable_thinking"


MARKED: Any = Letters("<think>", "</think>")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_thoughts_are_dimmed_on_a_terminal_and_left_out_elsewhere(is_terminal: bool) -> None:
    out, parser = io.StringIO(), parser_of(MARKED, MARKED.encode("q<think>"))
    writer = TextWriter(out, True, is_terminal)
    for token in MARKED.encode("hm\x1b</think>\n\nYes."):
        told = parser.feed([token])
        writer.commit([token], joined(told, Text), joined(told, Reasoning))
    writer.finish("Yes.")
    written = out.getvalue()
    assert writer.text == "Yes." and written.endswith("Yes.\n")
    assert ("\x1b[2mh\x1b[22m" in written) == is_terminal
    assert "\x1b\x1b" not in written and (is_terminal or written == "Yes.\n")


def test_the_live_view_prints_thoughts_above_the_answer() -> None:
    console = Console(file=io.StringIO(), width=60)
    with LiveView(console, MARKED, 0) as view:
        view.commit([1], "", "Hm.\nTwo")
        view.commit([2], "Ye", " lines")
        view.commit([3], "s.")
        assert view.text == "Yes."
        view.finish("Yes.")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "Hm.\nTwo lines\n\nYes.\n"


MARKS = ("<think>", "</think>")
DRAWN: Any = {"max_tokens": 8, "temperature": 50.0, "top_k": 1000, "top_p": 1.0}
DRAWN |= {"seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def thinker(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, where the second and the fifth token that it writes mark thoughts."""
    made = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(folder, made)
    with LLM(made, context=64, dtype="float32") as llm:
        [answer] = llm.generate([[5, 6, 7]], **DRAWN)
    ids = answer.token_ids
    assert len(set(ids)) == len(ids)
    said = {f"w{i} ": i for i in ids if i not in (ids[1], ids[4])}
    said |= {MARKS[0]: ids[1], MARKS[1]: ids[4]}
    file = json.loads((made / "tokenizer.json").read_text())
    words = {word: i for word, i in file["model"]["vocab"].items() if i not in ids}
    file["model"] |= {"merges": [], "vocab": words | said}
    (made / "tokenizer.json").write_text(json.dumps(file))
    return made


def test_thoughts_are_apart_in_every_way_of_asking(thinker: Path) -> None:
    with LLM(thinker, context=64, dtype="float32", cache="off") as llm:
        assert llm.tokenizer is not None and has_thoughts(llm.tokenizer)
        [found] = llm.generate([[5, 6, 7]], **DRAWN)
        [raw] = llm.generate([[5, 6, 7]], raw=True, **DRAWN)
        events = list(llm.stream([5, 6, 7], **DRAWN))
        parser = parser_of(llm.tokenizer, [5, 6, 7])
        told = [*parser.feed(found.token_ids), *parser.finish()]
        whole = llm.tokenizer.decode(found.token_ids)
    assert found.token_ids == raw.token_ids
    assert (raw.text, raw.reasoning) == (whole, "")
    assert (found.text, found.reasoning) == (joined(told, Text), joined(told, Reasoning))
    assert found.reasoning and MARKS[0] in whole and MARKS[0] not in found.text
    assert "".join(event.text for event in events) == found.text
    assert "".join(getattr(event, "reasoning", "") for event in events) == found.reasoning
    asked = ["generate", str(thinker), "--prompt-ids", "5 6 7", "--context", "64", "--ignore-eos"]
    asked += ["--dtype", "float32", "--max-tokens", "8", "--temperature", "50", "--seed", "1"]
    asked += ["--top-k", "1000", "--top-p", "1"]
    printed = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert (printed["text"], printed["reasoning"]) == (found.text, found.reasoning)
    assert CliRunner().invoke(app, asked).stdout == f"{found.text}\n"
    assert "reasoning" not in CliRunner().invoke(app, [*asked, "--raw", "--json"]).stdout


def test_a_stop_string_is_of_the_answer_and_not_of_thoughts() -> None:
    request = Request(prompt=MARKED.encode("q<think>"), params=SamplingParams(stop="es"))
    for is_raw, text, reasoning in ((False, "Y", "yes"), (True, "y", "")):
        asked = with_stop_test(replace(request, is_raw=is_raw), MARKED)
        ids = MARKED.encode("yes</think>Yes.")
        assert asked.is_stopped is not None
        num_taken = next(n for n in range(1, len(ids) + 1) if asked.is_stopped(ids[:n]))
        pieces = pieces_of(asked, MARKED)
        told = [*pieces.push(ids[:num_taken]), *pieces.finish()]
        assert (joined(told, Text), joined(told, Reasoning)) == (text, reasoning)


def test_whether_to_think_is_the_template_s() -> None:
    assert think_options(None, None) == {}
    assert think_options(False, MARKED) == {"enable_thinking": False}
    with pytest.raises(UsageError, match="chat template has no enable_thinking"):
        think_options(True, None)
