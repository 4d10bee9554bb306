"""Text and ids, chat templates, and what a hostile folder can do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import CheckpointError, UsageError
from lowtide.lab.synth_tokenizer import SPECIAL_TOKENS, tokenizer_config_json, tokenizer_json
from lowtide.model_folder import tokenizer as module
from lowtide.model_folder.template_worker import render
from lowtide.model_folder.tokenizer import Tokenizer, cut_at_stop

EOS = 300
HELLO = [{"role": "user", "content": "hello"}]


def make_folder(folder: Path, **config: object) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer_json(EOS))
    values = json.loads(tokenizer_config_json()) | config
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def load(folder: Path, **config: object) -> Tokenizer:
    tokenizer = Tokenizer.load(make_folder(folder, **config))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tokenizer"))


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


@given(st.text())
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    if not any(special in text for special in SPECIAL_TOKENS):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == EOS + 9
    assert tokenizer.eos_token_ids == (EOS,)
    assert tokenizer.mask_token_id == EOS + 3
    assert tokenizer.pad_token_id == EOS
    assert tokenizer.bos_token_id is None
    assert tokenizer.token_id("<|role_end|>") == EOS + 8
    assert tokenizer.token_id("no such token") is None
    assert len(tokenizer.encode("ab")) == 1 or len(tokenizer.encode(" a")) == 1
    assert tokenizer.decode([EOS, 97]) == "a"
    assert tokenizer.decode([EOS, 97], skip_special=False) == "<|endoftext|>a"


def test_every_id_has_a_piece(tokenizer: Tokenizer) -> None:
    assert all(tokenizer.piece(i) for i in range(tokenizer.vocab_size))
    assert tokenizer.piece(97) == "a"
    assert tokenizer.piece(32) == " "
    assert tokenizer.piece(5000) == "<5000>"
    assert tokenizer.piece(-1) == "<-1>"


@pytest.mark.parametrize("bad", ["\ud800", "a\udfff"])
def test_text_that_is_not_unicode(tokenizer: Tokenizer, bad: str) -> None:
    with pytest.raises(UsageError, match="Unicode"):
        tokenizer.encode(bad)


def test_text_that_is_too_long(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXT_CHARS", 5)
    with pytest.raises(UsageError, match="6 characters"):
        tokenizer.encode("123456")


@pytest.mark.parametrize("bad", [-1, 2**31, 2**70])
def test_ids_that_cannot_be(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(UsageError, match="outside"):
        tokenizer.decode([bad])


def test_vocabulary_must_fit_the_model(tokenizer: Tokenizer) -> None:
    tokenizer.check_vocabulary(EOS + 9)
    with pytest.raises(CheckpointError, match=f"{EOS + 8}.*{EOS + 7}"):
        tokenizer.check_vocabulary(EOS + 8)


@given(st.lists(st.integers(0, EOS + 8), max_size=60), st.integers(1, 7))
def test_stream_gives_the_whole_text(tokenizer: Tokenizer, ids: list[int], width: int) -> None:
    stream = tokenizer.stream()
    parts = [stream.push(ids[i : i + width]) for i in range(0, len(ids), width)]
    assert "".join(parts) + stream.finish() == tokenizer.decode(ids)


@given(
    st.text("ab \u732b!", max_size=20),
    st.lists(st.text("ab\u732b!", min_size=1, max_size=4), min_size=1, max_size=2),
)
def test_stream_ends_before_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stop: list[str]
) -> None:
    stream, parts = tokenizer.stream(stop), list[str]()
    for token_id in tokenizer.encode(text):
        parts.append(stream.push([token_id]))
        shown = "".join(parts)
        assert cut_at_stop(text, stop).startswith(shown)
        assert stream.is_stopped or not any(string in shown for string in stop)
    assert "".join(parts) + stream.finish() == cut_at_stop(text, stop)
    assert stream.is_stopped is any(string in text for string in stop)


def test_stream_shortens_its_window_and_goes_on(tokenizer: Tokenizer) -> None:
    text = "the quick brown \u732b jumps over \u00e9t\u00e9 " * 20
    stream = tokenizer.stream()
    assert "".join(stream.push([i]) for i in tokenizer.encode(text)) + stream.finish() == text
    assert stream.push(tokenizer.encode("again")) == "again"


def test_stream_hands_out_complete_characters_only(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    parts = [stream.push([i]) for i in "\u732b!".encode()]
    assert parts == ["", "", "\u732b", "!"]


def test_stream_of_garbage_does_not_wait_for_ever(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    assert len("".join(stream.push([0xFF]) for _ in range(100))) > 80


def test_chat_template_of_the_config(tokenizer: Tokenizer) -> None:
    expected = "<role>HUMAN</role>hello<|role_end|>"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == expected
    ids = tokenizer.encode_chat(HELLO)
    assert ids[0] == EOS + 6
    assert tokenizer.decode(ids, skip_special=False) == expected + "<role>ASSISTANT</role>"


def test_chat_template_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}\n  {% if loop.first %}{{ m['content'] }}{% endif %}\n{% endfor %}"
        "{% generation %}!{% endgeneration %}{{ eos_token }}{{ messages | tojson }}{{ mode }}"
    )
    rendered = load(tmp_path).render_chat(HELLO, options={"mode": "fast"})
    assert rendered == 'hello!<|endoftext|>[{"role": "user", "content": "hello"}]fast'


def test_named_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    assert load(tmp_path, chat_template=named).render_chat(HELLO) == "d"
    assert load(tmp_path, chat_template=named[:1]).render_chat(HELLO) == "t"


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.render_chat(HELLO)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        ["hello"],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": "a", "name": "b"}],
        [{"role": "oracle", "content": "a"}],
        [{"role": 7, "content": "a"}],
    ],
)
def test_messages_are_checked(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> None:
    with pytest.raises(UsageError):
        tokenizer.render_chat(messages)


def test_template_options_are_plain_values(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="plain JSON"):
        tokenizer.render_chat(HELLO, options={"f": object()})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{{ 'a' | center(10**10) }}", "memory"),
        (
            "{% set n = namespace(s='a' * 1000) %}"
            "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "memory",
        ),
        ("{% for i in messages * 99999 %}{{ 'a' * 99 }}{% endfor %}", "characters"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recurs"),
        ("{% for %}", "[Ee]xpected"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[99].content }}", "no element 99"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_hostile_and_broken_templates(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load(tmp_path, chat_template=template).render_chat(HELLO)


def test_format_reaches_no_python_object() -> None:
    assert render("{{ '<{0.__class__}>'.format(m) }}", {"m": []}, 99) == "<>"


def test_template_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEMPLATE_CPU_S", 1)
    loops = "".join(f"{{% for x{i} in range(99999) %}}" for i in range(4)) + "{% endfor %}" * 4
    with pytest.raises(UsageError, match="stopped|did not finish"):
        load(tmp_path, chat_template=loops).render_chat(HELLO)


def test_template_that_waits_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEMPLATE_WALL_S", 0.001)
    with pytest.raises(UsageError, match="did not finish"):
        load(tmp_path).render_chat(HELLO)


def test_the_dialect_of_published_templates() -> None:
    template = "{%- for m in messages %}{% if m.x %}{% break %}{% endif %}{{ m.a }}{% endfor %}"
    messages = [{"a": 1}, {"a": 2, "x": True}, {"a": 3}]
    assert render(template, {"messages": messages}, 100) == "1"
    assert len(render("{{ strftime_now('%Y') }}", {}, 100)) == 4


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"model": {}}', '{"version": "1.0", "model": 3}', "\0" * 9]
)
def test_damaged_tokenizer(tmp_path: Path, content: str) -> None:
    make_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 200_000])
def test_damaged_tokenizer_config(tmp_path: Path, content: str) -> None:
    make_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("template", [3, [3], [], "a" * (module.MAX_TEMPLATE_CHARS + 1)])
def test_chat_template_of_a_wrong_kind(tmp_path: Path, template: object) -> None:
    with pytest.raises(CheckpointError, match="chat.template"):
        load(tmp_path, chat_template=template)


def test_files_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path)
    monkeypatch.setattr(module, "MAX_TOKENIZER_BYTES", 10)
    with pytest.raises(CheckpointError, match="at most 10"):
        Tokenizer.load(tmp_path)


@examples(20)
@given(st.text(max_size=50))
def test_content_is_never_a_template(content: str) -> None:
    assert render("{{ messages[0].content }}", {"messages": [{"content": content}]}, 999) == content
