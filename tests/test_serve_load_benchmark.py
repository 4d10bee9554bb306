"""`benchmarks/serve_load.py`: what it counts, and what it divides by what; no speed is judged."""

from __future__ import annotations

from argparse import Namespace
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowtide.errors import InternalError
from lowtide.model_writing.synth import synth

served = import_module("common.served")
serve_load = import_module("serve_load")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("served") / "tiny")


def test_a_load_is_told_by_its_tokens() -> None:
    whole = served.Reply(10.0, [0.2, 0.3, 0.5], usage={"prompt_tokens": 9})
    cut = served.Reply(11.0, [0.4, 0.5])
    refused = served.Reply(refused_s=1.0)
    replies = [whole, cut, refused, served.Reply()]
    marks = [(10.0, 0.0), (11.0, 7.0), (12.0, 7.0), (13.0, 9.0)]
    stretches = served.split_stretches(replies, marks)
    assert [each.num_tokens for each in stretches] == [3, 2, 0]
    assert [each.growth for each in stretches] == [7, 0, 2]
    told = served.Load(2, replies, stretches).as_dict()
    assert told["tokens_per_s"] == 2 and told["each_tokens_per_s"] == [3, 2, 0]
    assert told["first_s_p50"] == pytest.approx(0.3)
    assert told["token_s_p50"] == pytest.approx(0.1)
    assert (told["num_whole"], told["num_refused"], told["num_without_token"]) == (1, 1, 1)
    assert told["prompt_tokens"] == 9
    nothing = served.Load(1, [], stretches).as_dict()
    assert nothing["first_s_p99"] is None and nothing["prompt_tokens"] is None


def test_an_answer_that_fails_is_no_result() -> None:
    with pytest.raises(InternalError, match="as told"):
        served.take({"error": "as told"}, 1.0, served.Reply())


def test_prompts_differ_by_clients_and_number() -> None:
    texts = {serve_load.draw_words(4, clients, number) for clients in (1, 4) for number in range(3)}
    assert len(texts) == 6 and all(len(text.split()) == 4 for text in texts)


def test_a_server_of_its_own_answers_clients_and_stands_beside_python(folder: Path) -> None:
    options = Namespace(words=4, new=6, seconds=3.0, behind=100)
    with served.serving(*serve_load.server_command(folder, 1024)) as server:
        serve_load.warm(server)
        row, load = serve_load.loaded(server, 3, options.words, options)
        with serve_load.LLM(folder, context=1024, progress=False) as llm:
            beside = serve_load.beside_python(server, llm, options)
            with closing(served.Client(server.url)) as client:
                turns = serve_load.time_turns(client, llm, options.behind, 0)
        disk = SimpleNamespace(measure=lambda: {"random_read_GBps": 1.0})
        from_disk = serve_load.from_disk(server, load, disk, options)
        with (
            closing(served.Client(server.url)) as client,
            pytest.raises(InternalError, match="400"),
        ):
            client.ask({"prompt": "a", "max_tokens": 1 << 20})
    assert row["clients"] == 3 and row["num_whole"] >= 3 and row["num_refused"] == 0
    assert row["resident_after_bytes"] > 0 and len(beside["each_over_python"]) > 0
    assert len(turns) == 7 and all(turn.served_s > 0 < turn.bare_s for turn in turns)
    assert from_disk["read_bytes"] == 0 and from_disk["of_bound"] > 0


def test_a_server_that_ends_at_once_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(InternalError, match="ended with status"),
        served.serving("lowtide", "serve", str(tmp_path / "no-model"), "--offline"),
    ):
        pass
