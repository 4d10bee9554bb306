"""Text and ids, chat templates, and what a hostile folder can do."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import CheckpointError, UnsupportedError, UsageError
from lowtide.model_folder import chat_template
from lowtide.model_folder import tokenizer as module
from lowtide.model_folder.template_worker import render
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.model_writing.synth_tokenizer import (
    SPECIAL_TOKENS,
    tokenizer_config_json,
    tokenizer_json,
)

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


@given(st.text(min_size=1))
def test_bytes_of_tokens_make_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Of half characters, too."""
    if not any(special in text for special in SPECIAL_TOKENS):
        pieces = [tokenizer.piece_bytes(token) for token in tokenizer.encode(text)]
        assert b"".join(piece or b"?" for piece in pieces) == text.encode()


def test_bytes_of_ids_without_a_token_are_not_known(tokenizer: Tokenizer) -> None:
    assert [tokenizer.piece_bytes(token) for token in (-1, 10**6, 2**40)] == [None] * 3
    assert tokenizer.piece_bytes(EOS) == b"<|endoftext|>"


@given(st.text())
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    if not any(special in text for special in SPECIAL_TOKENS):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == EOS + 9
    assert tokenizer.eos_token_ids == (EOS,)
    assert tokenizer.token_id("<|mask|>") == EOS + 3
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


@pytest.mark.parametrize("bad", ["\ud800", "a\udfff", "a\udfff is somewhere in a prompt"])
def test_text_that_is_not_unicode(tokenizer: Tokenizer, bad: str) -> None:
    """The fault is shown: a prompt's place is after a template's words, which nobody has typed."""
    with pytest.raises(UsageError, match="not valid Unicode at character") as told:
        tokenizer.encode(bad)
    assert repr(bad.removeprefix("a")[:20]) in str(told.value)


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
    expected = "<role>HUMAN</role>hello<|role_end|><role>ASSISTANT</role>"
    assert tokenizer.render_chat(HELLO) == expected
    ids = tokenizer.encode_chat(HELLO)
    assert ids[0] == EOS + 6
    assert tokenizer.decode(ids, skip_special=False) == expected


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


TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}


def tool_template_file(folder: Path, text: str) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(text)


def test_the_template_for_tools_is_taken_with_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "d"},
        {"name": "rag", "template": "r"},
        {"name": "tool_use", "template": "t{% if tools %}{{ tools[0].function.name }}{% endif %}"},
    ]
    tokenizer = load(tmp_path, chat_template=named)
    assert tokenizer.render_chat(HELLO) == "d"
    assert tokenizer.render_chat(HELLO, {"tools": []}) == "d"
    assert tokenizer.render_chat(HELLO, TOOLS) == "tf"
    assert tokenizer.template_names("tools")
    tool_template_file(tmp_path, "file{{ tools }}")  # files go before
    assert load(tmp_path, chat_template=named).render_chat(HELLO, TOOLS).startswith("file[")
    assert load(tmp_path, chat_template="c").render_chat(HELLO) == "c"
    (tmp_path / "chat_template.jinja").write_text("d2")
    tokenizer = load(tmp_path, chat_template=named)
    assert tokenizer.render_chat(HELLO) == "d2"
    assert tokenizer.render_chat(HELLO, TOOLS).startswith("file[")
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    with pytest.raises(UnsupportedError, match="has no tools"):
        load(tmp_path, chat_template=named).render_chat(HELLO, TOOLS)


def test_one_template_alone_is_for_all_conversations(tmp_path: Path) -> None:
    tool_template_file(tmp_path, "all")
    assert load(tmp_path, chat_template=None).render_chat(HELLO) == "all"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_mark_of_utf_8_at_a_file_s_beginning_is_no_part_of_it(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    expected = Tokenizer.load(tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + data)
    found = Tokenizer.load(tmp_path)
    assert expected is not None and found is not None
    assert found.render_chat(HELLO) == expected.render_chat(HELLO) == "[hello]"
    assert found.as_json() == expected.as_json()
    (tmp_path / name).write_bytes("\ufeff".encode("utf-16-le") + data)
    with pytest.raises(CheckpointError):
        Tokenizer.load(tmp_path)


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(UsageError, match=r"no chat template \(tokenizer_config.json has no"):
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
        ("{{ messages.clear() }}", "unsafe"),
        ("{% for m in messages %}{{ messages.append(m) or '' }}{% endfor %}", "memory|stopped"),
        ("{{ 5 | dictsort }}", "chat template failed"),
        ("{{ messages | sum }}", "chat template failed"),
        ("{{ 5() }}", "chat template failed"),
    ],
)
def test_hostile_and_broken_templates(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load(tmp_path, chat_template=template).render_chat(HELLO)


def test_format_reaches_no_python_object() -> None:
    assert render("{{ '<{0.__class__}>'.format(m) }}", {"m": []}, 99) == "<>"


def test_template_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_CPU_S", 1)
    loops = "".join(f"{{% for x{i} in range(99999) %}}" for i in range(4)) + "{% endfor %}" * 4
    with pytest.raises(UsageError, match="stopped|did not finish"):
        load(tmp_path, chat_template=loops).render_chat(HELLO)


def test_template_that_waits_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_WALL_S", 0.3)
    loops = "".join(f"{{% for x{i} in range(99999) %}}" for i in range(4)) + "{% endfor %}" * 4
    with pytest.raises(UsageError, match="did not finish within 0.3 s"):
        load(tmp_path, chat_template=loops).render_chat(HELLO)


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


def edit_tokenizer(folder: Path, **changes: object) -> Path:
    path = make_folder(folder) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


SLOW_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$"},
    "behavior": "Isolated",
    "invert": False,
}


def test_a_tokenizer_that_panics_on_a_text(tmp_path: Path) -> None:
    """A panic of Rust code is a BaseException, and no Exception."""
    tokenizer = Tokenizer.load(edit_tokenizer(tmp_path, pre_tokenizer=SLOW_SPLIT))
    assert tokenizer.encode("ab")
    with pytest.raises(CheckpointError, match="failed on a text of 41 characters.*token ids"):
        tokenizer.encode("a" * 40 + "!")


class Failing:
    """A tokenizer of the library that fails at one thing, from then on."""

    def __init__(self, backend: Any, name: str, error: BaseException) -> None:
        self._backend, self._name, self._error = backend, name, error

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise self._error
        return getattr(self._backend, name)


def failing(name: str, error: BaseException) -> Tokenizer:
    backend: Any = Failing(tokenizers.Tokenizer.from_str(tokenizer_json(EOS)), name, error)
    return Tokenizer(backend, {}, None)


class Panic(BaseException):
    pass


@pytest.mark.parametrize("error", [Panic("\x1b[2Jgone"), Exception("gone")])
def test_whatever_the_tokenizer_fails_with_is_typed(error: BaseException) -> None:
    tokenizer = failing("decode", error)
    stream = tokenizer.stream()
    for fails in (
        lambda: tokenizer.decode([1, 2]),
        lambda: tokenizer.piece(2),
        lambda: stream.push([1, 2]),
        stream.finish,
    ):
        with pytest.raises(
            CheckpointError, match=r"failed to write \d tokens as text: .*gone"
        ) as said:
            fails()
        assert said.value.args[0].isprintable()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_tokenizer_is_interrupted(error: type[BaseException]) -> None:
    with pytest.raises(error):
        failing("encode_batch", error()).encode("1")
    with pytest.raises(error):
        failing("decode", error()).decode([1])


def test_special_tokens_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json do not make a tokenizer"):
        load(tmp_path, eos_token="\ud800")


def test_a_tokenizer_that_adds_very_many_tokens(tmp_path: Path) -> None:
    added = {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 5
        + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"x": added},
    }
    edit_tokenizer(tmp_path, post_processor=template)
    with pytest.raises(CheckpointError, match="adds 5000 special tokens .* at most 4096"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", ["normalizer", "decoder"])
def test_a_tokenizer_that_makes_texts_very_long(tmp_path: Path, kind: str) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    for num_steps in (3, 12):
        steps = {"type": "Sequence", f"{kind}s": [replace] * num_steps}
        edit_tokenizer(tmp_path, **(NO_PARTS | {kind: steps}))
        if num_steps == 3:
            assert Tokenizer.load(tmp_path) is not None
            continue
        with pytest.raises(CheckpointError, match=f"{10**12} characters of one; at most 4096"):
            Tokenizer.load(tmp_path)


NO_PARTS = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}

METASPACE = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}

BETWEEN = {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}


def charsmap(replacement: str) -> object:
    """A map of SentencePiece with one replacement, and a trie that finds nothing."""
    trie = bytes(4 * 256)
    content = len(trie).to_bytes(4, "little") + trie + f"{replacement}\0".encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def steps(name: str, step: object) -> Callable[[int], object]:
    return lambda num_steps: {"type": "Sequence", name: [step] * num_steps}


def text_again(num_times: int) -> object:
    text = [{"Sequence": {"id": "A", "type_id": 0}}] * num_times
    return {"type": "TemplateProcessing", "single": text, "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("kind", "make", "most"),
    [
        ("normalizer", steps("normalizers", {"type": "Prepend", "prepend": "abc"}), 6),
        ("normalizer", steps("normalizers", {"type": "ByteLevel"}), 6),
        ("pre_tokenizer", steps("pretokenizers", BYTES), 6),
        ("pre_tokenizer", steps("pretokenizers", METASPACE), 12),
        ("normalizer", steps("normalizers", {"type": "NFKC"}), 2),
        ("normalizer", steps("normalizers", BETWEEN), 12),
        ("normalizer", lambda num_chars: charsmap("x" * num_chars), 4096),
        ("decoder", steps("decoders", {"type": "WordPiece", "prefix": "#", "cleanup": False}), 12),
        ("post_processor", text_again, 4096),
    ],
)
def test_every_part_that_makes_a_text_longer_is_counted(
    kind: str, make: Callable[[int], object], most: int, tmp_path: Path
) -> None:
    assert Tokenizer.load(edit_tokenizer(tmp_path, **(NO_PARTS | {kind: make(most)})))
    for num_times in (most + 1, 100 * most):
        edit_tokenizer(tmp_path, **(NO_PARTS | {kind: make(num_times)}))
        with pytest.raises(CheckpointError, match="characters of one; at most 4096"):
            Tokenizer.load(tmp_path)


def test_parts_that_make_a_text_longer_do_so_one_after_another(tmp_path: Path) -> None:
    make = {
        "normalizer": steps("normalizers", BYTES),
        "pre_tokenizer": steps("pretokenizers", BYTES),
        "post_processor": lambda num_steps: text_again(4**num_steps),
    }
    for kind in make:
        folder = tmp_path / kind
        folder.mkdir()
        parts = {other: each(2) for other, each in make.items()}
        assert Tokenizer.load(edit_tokenizer(folder, **parts)) is not None
        edit_tokenizer(folder, **(parts | {kind: make[kind](3)}))
        with pytest.raises(CheckpointError, match=f"make {4**7} characters of one"):
            Tokenizer.load(folder)


def test_the_longest_published_chain_is_accepted(tmp_path: Path) -> None:
    """XLNet's and ALBERT's; T5's is a part of it."""
    quotes = [{"type": "Replace", "pattern": {"String": mark * 2}, "content": '"'} for mark in "`'"]
    forms = [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, charsmap("x" * 18)]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*quotes, *forms, spaces]},
        "pre_tokenizer": METASPACE,
    }
    assert Tokenizer.load(edit_tokenizer(tmp_path, **parts)) is not None


def test_a_text_has_the_same_ids_each_time(tmp_path: Path) -> None:
    """Dropout of merges is for training."""
    model = json.loads((make_folder(tmp_path) / "tokenizer.json").read_text())["model"]
    assert model["type"] == "BPE"
    tokenizer = Tokenizer.load(edit_tokenizer(tmp_path, model=model | {"dropout": 0.9}))
    assert tokenizer.encode("1 2 3 the text") == load(tmp_path).encode("1 2 3 the text")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_none(tmp_path: Path, name: str) -> None:
    """Opening a pipe for reading would wait for a writer; a dangling link is not an absent file."""
    path = make_folder(tmp_path) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        Tokenizer.load(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=f"{name} is missing: its link leads nowhere"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 200_000])
def test_damaged_tokenizer_config(tmp_path: Path, content: str) -> None:
    make_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("template", [3, [3], [], "a" * (chat_template.MAX_TEMPLATE_CHARS + 1)])
def test_chat_template_of_a_wrong_kind(tmp_path: Path, template: object) -> None:
    with pytest.raises(CheckpointError, match="chat.template"):
        load(tmp_path, chat_template=template)


@pytest.mark.parametrize(
    "entry",
    [
        {"name": [1], "template": "x"},
        {"name": {}, "template": "x"},
        {"name": 3, "template": "x"},
        {"name": "default", "template": ["x"]},
        {"name": "default"},
        {"template": "x"},
        ["default", "x"],
        None,
    ],
)
def test_named_chat_templates_of_a_wrong_kind(tmp_path: Path, entry: object) -> None:
    right = {"name": "default", "template": "d"}
    for named in ([entry], [right, entry]):
        number = len(named) - 1
        with pytest.raises(CheckpointError, match=f"entry {number} of the {len(named)} in chat_te"):
            load(tmp_path, chat_template=named)


def test_what_a_template_says_cannot_reach_the_terminal(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_template="{{ raise_exception('a\x1b[2Jb\u4e2d') }}")
    with pytest.raises(UsageError, match=r"failed: a\\x1b\[2Jb\u4e2d\."):
        tokenizer.render_chat(HELLO)


def test_files_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path)
    monkeypatch.setattr(module, "MAX_TOKENIZER_BYTES", 10)
    with pytest.raises(CheckpointError, match="at most 10"):
        Tokenizer.load(tmp_path)
