"""Kept sequences in files: what is written comes back bit for bit, and nothing else is believed."""

from __future__ import annotations

import errno
import logging
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_kept_sequences import AUTOREGRESSIVE, BLOCKS, SYSTEM, Case, ask, make_decoder

from lowtide.core import Reuse
from lowtide.decode import sequence_writer
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.request import Finished
from lowtide.decode.stored_sequences import StoredSequences
from lowtide.errors import StorageError, UsageError
from lowtide.files import kept_file
from lowtide.files.kept_file import BORDER_BYTES, MAC_BYTES, MODEL_BYTES, FileHead, KeyLayout
from lowtide.files.own_folder import SECRET_BYTES, OwnFolder, own_secret
from lowtide.files.stored_files import StoredFiles
from lowtide.memory.kv_cache import KVCache

KEY = b"k" * SECRET_BYTES
DIGEST = b"d" * 32
LAYOUT = KeyLayout(((2, 2, 1, 1),), 8)  # of the hash model's cache: 32 bytes a token
NUM_PROMPT = 100
FILE_BYTES = 128 << 10  # more than any file here


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    """Of 16 tokens, so that a file has several; nothing is waited for before it is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_file, "CHUNK_BYTES", 16 * LAYOUT.token_bytes)
        patch.setattr(sequence_writer, "SETTLE_S", 0.0)
        yield


class Lines(logging.Handler):
    """The warnings of lowtide."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def lines_noted() -> Iterator[list[str]]:
    lines, log = Lines(), logging.getLogger("lowtide")
    log.addHandler(lines)
    try:
        yield lines.said
    finally:
        log.removeHandler(lines)


class Engine(NamedTuple):
    """A decoder whose kept sequences also lie in a folder."""

    case: Case
    decoder: BatchDecoder
    kv_cache: KVCache
    stored: StoredSequences

    def ask(self, prompt: list[int], max_tokens: int = 8) -> Finished:
        return ask(self.decoder, self.case, prompt, max_tokens)


@contextmanager
def opened(
    folder: Path,
    case: Case = AUTOREGRESSIVE,
    digest: bytes = DIGEST,
    key: bytes = KEY,
    most_bytes: int = 1 << 30,
) -> Iterator[Engine]:
    decoder, kv_cache = make_decoder(case, case.reuse)
    files = StoredFiles(OwnFolder(folder), key, most_bytes)
    stored = StoredSequences(files, digest, "a model", kv_cache, LAYOUT)
    decoder.store_in(stored)
    try:
        yield Engine(case, decoder, kv_cache, stored)
    finally:
        decoder.close()
        stored.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def prompt_of(number: int, length: int = NUM_PROMPT) -> list[int]:
    """Prompts that begin with different tokens."""
    return [number % 19, *SYSTEM[: length - 1]]


@pytest.mark.parametrize("case", [AUTOREGRESSIVE, BLOCKS], ids=["tokens", "blocks"])
def test_a_conversation_goes_on_after_a_restart(tmp_path: Path, case: Case) -> None:
    """Three turns, each in a decoder of its own; one file is left, of the longest."""
    folder, text = tmp_path / "kept", prompt_of(1)
    for turn in range(3):
        alone, _ = make_decoder(case, Reuse.OFF)
        with opened(folder, case) as engine:
            found = engine.ask(text)
        assert found.token_ids == ask(alone, case, text).token_ids
        assert found.num_resumed % case.block_length == 0
        num_unknown = len(text) - found.num_resumed
        if not turn:
            assert found.num_resumed == 0
        elif case is AUTOREGRESSIVE:
            assert num_unknown == 11  # what was added, and the last answer's last token
        else:  # and the last block, which no pass has seen whole
            assert 11 <= num_unknown < 11 + 2 * case.block_length
        text = [*text, *found.token_ids, *SYSTEM[turn : turn + 10]]
        assert len(names(folder)) == 1
    assert os.stat(folder).st_mode & 0o777 == 0o700
    [name] = names(folder)
    assert os.stat(folder / name).st_mode & 0o777 == 0o600


def test_other_models_and_block_lengths_find_nothing(tmp_path: Path) -> None:
    folder, text = tmp_path / "kept", prompt_of(1)
    with opened(folder, BLOCKS) as engine:
        engine.ask(text)
    with opened(folder, BLOCKS, digest=b"e" * 32) as engine:
        assert engine.ask(text).num_resumed == 0
    with opened(folder, BLOCKS._replace(block_length=6)) as engine:
        assert engine.ask(text).num_resumed == 0
    assert len(names(folder)) == 3


def test_what_memory_has_is_not_read(tmp_path: Path) -> None:
    folder, text = tmp_path / "kept", prompt_of(1)
    with opened(folder) as engine:
        first = engine.ask(text)
        engine.stored.drain()
        for path in folder.iterdir():
            path.write_bytes(b"")
        with lines_noted() as said:
            assert engine.ask([*text, *first.token_ids, 5]).num_resumed == NUM_PROMPT + 7
        assert len(said) == 1 and "is ignored: it ends before" in said[0]


def test_what_gave_way_in_memory_comes_back_from_disk(tmp_path: Path) -> None:
    case = AUTOREGRESSIVE._replace(num_tokens=288)
    with opened(tmp_path / "kept", case) as engine:
        for number in range(6):
            engine.ask(prompt_of(number))
            engine.stored.drain()
        for number in range(6):
            assert engine.ask(prompt_of(number)).num_resumed == NUM_PROMPT - 1


def test_a_range_knows_when_a_file_has_all_of_it(tmp_path: Path) -> None:
    with opened(tmp_path / "kept") as engine:
        first = engine.ask(prompt_of(1))
        engine.stored.drain()
        [kv] = engine.kv_cache.kept
        assert kv.num_stored == kv.num_kept == 1
        engine.ask([*prompt_of(1), *first.token_ids, 5])
        assert (kv,) == engine.kv_cache.kept and kv.num_kept == 2
        engine.stored.drain()
        assert kv.num_stored == 2
    with opened(tmp_path / "kept") as engine:
        engine.ask([*prompt_of(1), *first.token_ids], max_tokens=1)
        engine.stored.drain()
        [kv] = engine.kv_cache.kept
        assert kv.num_stored == kv.num_kept, "nothing had to be written"


def test_a_range_is_told_that_its_file_went_for_another_s(tmp_path: Path) -> None:
    with opened(tmp_path / "kept", most_bytes=LAYOUT.file_bytes(NUM_PROMPT + 7)) as engine:
        for number in (1, 2):
            engine.ask(prompt_of(number))
            engine.stored.drain()
        first, second = engine.kv_cache.kept
        assert first.num_stored == 0 and second.num_stored == second.num_kept == 1


def test_the_longest_unused_go_first_and_all_stay_within_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    file_bytes = LAYOUT.file_bytes(NUM_PROMPT + 7)
    with opened(folder, most_bytes=2 * file_bytes) as engine:
        engine.ask(prompt_of(1))
    [first] = names(folder)
    os.utime(folder / first, ns=(1, 1))
    with opened(folder, most_bytes=2 * file_bytes) as engine:
        engine.ask(prompt_of(2))
        engine.stored.drain()
        [second] = set(names(folder)) - {first}
        os.utime(folder / second, ns=(2, 2))
        engine.ask(prompt_of(1))  # from the file, which is used so
        engine.stored.drain()
        engine.ask(prompt_of(3))
        engine.stored.drain()
        assert first in names(folder) and second not in names(folder) and len(names(folder)) == 2
    with opened(folder, most_bytes=file_bytes - 1) as engine, lines_noted() as said:
        engine.ask(prompt_of(4))
        engine.stored.drain()
        assert len(said) == 1 and "of cache_disk, which is" in said[0]


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir(0o700)
    (folder / "mine.txt").write_text("mine")
    draft = folder / f"{'0' * 32}-{'0' * 16}.keys.01234567"  # of a program that was killed
    draft.write_bytes(b"\0" * FILE_BYTES)
    os.utime(draft, ns=(1, 1))
    with opened(folder, most_bytes=FILE_BYTES) as engine, lines_noted() as said:
        engine.ask(prompt_of(1))
        engine.stored.drain()
        assert not said and not draft.exists() and len(names(folder)) == 2
    with closing(StoredFiles(OwnFolder(folder), KEY, FILE_BYTES)) as files:
        assert len(files.clear()) == 1 and names(folder) == ["mine.txt"]


@pytest.mark.parametrize("after", range(7))
def test_a_range_that_goes_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """At any of its chunks; another that has come to its place is not written as if it were it."""
    copy_kept, calls = KVCache.copy_kept, iter(range(100))
    with opened(tmp_path / "kept") as engine, lines_noted() as said:

        def giving_way(cache: KVCache, *arguments: Any) -> bool:
            if next(calls) == after:
                [kept] = cache.kept
                cache.resume(kept, 50, 150)
                cache.keep(kept, 150)
            return copy_kept(cache, *arguments)

        monkeypatch.setattr(KVCache, "copy_kept", giving_way)
        engine.ask(prompt_of(1))
        engine.stored.drain()
        assert not said and names(tmp_path / "kept") == []


def test_a_range_that_moves_while_it_is_written_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_kept, calls = KVCache.copy_kept, iter(range(100))
    with opened(tmp_path / "kept") as engine:
        blocked = engine.kv_cache.allocate(64)

        def moving(cache: KVCache, *arguments: Any) -> bool:
            if next(calls) == 3:
                cache.free(blocked)
                cache.free(cache.allocate(cache.num_unused_tokens))  # where all of them adjoin
            return copy_kept(cache, *arguments)

        monkeypatch.setattr(KVCache, "copy_kept", moving)
        expected = engine.ask(prompt_of(1))
        engine.stored.drain()
        assert engine.kv_cache.kept[0].start == 0
    with opened(tmp_path / "kept") as engine:
        again = engine.ask(prompt_of(1))
    assert again.num_resumed == NUM_PROMPT - 1 and again.token_ids == expected.token_ids


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_full_disk_is_a_line_and_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    write, calls = os.write, iter(range(1000))

    def full(descriptor: int, content: Any) -> int:
        if next(calls) == after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    with opened(tmp_path / "kept") as engine, lines_noted() as said:
        monkeypatch.setattr(sequence_writer.os, "write", full)
        engine.ask(prompt_of(1))
        engine.stored.drain()
        assert len(said) == 1 and "No space left on device" in said[0]
        assert names(tmp_path / "kept") == []
        engine.ask(prompt_of(2))
        engine.stored.drain()
        assert len(said) == 1 and len(names(tmp_path / "kept")) == 1


def test_a_folder_that_is_removed_is_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with opened(folder) as engine, lines_noted() as said:
        folder.rmdir()
        engine.ask(prompt_of(1))
        engine.stored.drain()
        assert len(said) <= 2 and engine.ask(prompt_of(1)).num_resumed == NUM_PROMPT - 1


# Damage


class Damage(NamedTuple):
    """Damage to the file of one of two conversations, or a thing in its place."""

    kind: str
    place: float  # where in the file, from 0 to 1
    value: int


damages = st.builds(
    Damage,
    st.sampled_from(
        ["flip", "cut", "longer", "zeros", "swap", "other", "foreign", "forged", "renamed", "link"]
    ),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 255),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files by what they are: two conversations, one of another model, one of another's key."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_file, "CHUNK_BYTES", 16 * LAYOUT.token_bytes)
        for what, number, others in (
            ("own", 1, {}),
            ("other", 2, {}),
            ("foreign", 1, {"digest": b"e" * 32}),
            ("forged", 1, {"key": b"f" * SECRET_BYTES}),
        ):
            folder = tmp_path_factory.mktemp(what) / "kept"
            with opened(folder, **others) as engine:  # type: ignore[arg-type]
                engine.ask(prompt_of(number))
            [path] = folder.iterdir()
            found[what], found[f"name of {what}"] = path.read_bytes(), path.name.encode()
    return found


def damaged(whole: dict[str, bytes], damage: Damage) -> bytes:
    """Return the content of the file of "own" after the damage."""
    content, chunk_bytes = bytearray(whole["own"]), LAYOUT.stored_bytes(16)
    at = int(damage.place * len(content))
    if damage.kind == "flip":
        content[at] ^= damage.value
    elif damage.kind == "cut":
        del content[at:]
    elif damage.kind == "longer":
        content += bytes(damage.value)
    elif damage.kind == "zeros":
        content[at:] = bytes(len(content) - at)
    elif damage.kind == "swap":  # of two chunks; some exchange one with itself
        one, two = BORDER_BYTES, BORDER_BYTES + damage.value % 6 * chunk_bytes
        first, second = content[one : one + chunk_bytes], content[two : two + chunk_bytes]
        content[one : one + chunk_bytes], content[two : two + chunk_bytes] = second, first
    elif damage.kind == "renamed":  # a chunk of another conversation, with its proof
        one = BORDER_BYTES + damage.value % 6 * chunk_bytes
        content[one : one + chunk_bytes] = whole["other"][one : one + chunk_bytes]
    elif damage.kind != "link":
        content = bytearray(whole[damage.kind])
    return bytes(content)


def head_of(num_tokens: int) -> FileHead:
    return FileHead.of(bytes(MODEL_BYTES), "", np.zeros(num_tokens, np.int64), (), KEY)


def is_proved(content: bytes, expected: bytes) -> bool:
    """Return True if the two differ only in zeros behind a MAC, which mean nothing."""
    if len(content) != len(expected):
        return False
    num_tokens = NUM_PROMPT + 7
    parts = [range(len(head_of(num_tokens).facts) + 4 * num_tokens + MAC_BYTES)]
    for tokens in LAYOUT.chunks(num_tokens):
        start = BORDER_BYTES + tokens.start // 16 * LAYOUT.stored_bytes(16)
        parts.append(range(start, start + len(tokens) * LAYOUT.token_bytes + MAC_BYTES))
    return all(content[p.start : p.stop] == expected[p.start : p.stop] for p in parts)


@cache
def ids_without_files() -> list[int]:
    alone, _ = make_decoder(AUTOREGRESSIVE, Reuse.OFF)
    return ask(alone, AUTOREGRESSIVE, prompt_of(1)).token_ids


def check_damage(whole: dict[str, bytes], damage: Damage) -> None:
    content, name = damaged(whole, damage), whole["name of own"].decode()
    is_sound = damage.kind != "link" and is_proved(content, whole["own"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "kept"
        folder.mkdir(0o700)
        if damage.kind == "link":
            (Path(place) / "elsewhere").write_bytes(content)
            (folder / name).symlink_to(Path(place) / "elsewhere")
        else:
            (folder / name).write_bytes(content)
        with opened(folder) as engine, lines_noted() as said:
            found = engine.ask(prompt_of(1))
            again = engine.ask(prompt_of(1))
            engine.stored.drain()
        assert found.token_ids == again.token_ids == ids_without_files()
        assert found.num_resumed == (NUM_PROMPT - 1 if is_sound else 0)
        # A link is none of the folder's regular files: it is not even looked at.
        assert len(said) == (not is_sound and damage.kind != "link"), said
        assert (folder / name).is_file() and not (folder / name).is_symlink()


@given(damages)
@examples(1500)
def test_what_was_changed_is_told_once_and_never_believed(
    whole: dict[str, bytes], damage: Damage
) -> None:
    """Damaged, cut, swapped, forged and foreign files: the answers are those without any."""
    check_damage(whole, damage)


@given(st.binary(max_size=600), st.integers(-(2**63), 2**63 - 1))
@examples(500)
def test_any_bytes_are_a_head_or_refused(content: bytes, num_tokens: int) -> None:
    """Sizes are bounded before they are used."""
    sizes = struct.pack("<3q", num_tokens, num_tokens % 7, num_tokens % 5)
    facts = head_of(1000).facts.replace(struct.pack("<3q", 1000, 0, 0), sizes)
    assert sizes in facts
    for head in (content, facts + content):
        with tempfile.TemporaryFile() as file:
            file.write(head)
            file.flush()
            with pytest.raises(kept_file.Contradiction):
                FileHead.read(file.fileno(), KEY)


def test_a_failed_read_is_a_line_and_the_beginning_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "kept") as engine:
        expected = engine.ask(prompt_of(1))

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with opened(tmp_path / "kept") as engine, lines_noted() as said:
        found = engine.ask(prompt_of(1))
        assert (found.num_resumed, found.token_ids) == (0, expected.token_ids)
        assert len(said) == 1 and "Input/output error" in said[0]
        assert not engine.kv_cache.taken[1:]


# The folder and the key


def test_a_link_and_what_others_may_write_to_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    OwnFolder(folder).close()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UsageError, match="is a link: name the folder"):
        OwnFolder(tmp_path / "link")
    for mode in (0o770, 0o702):
        folder.chmod(mode)
        with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 700"):
            OwnFolder(folder)
    folder.chmod(0o755)
    OwnFolder(folder).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be opened"):
        OwnFolder(tmp_path / "file")
    with pytest.raises(StorageError, match="No such file"):
        OwnFolder(tmp_path / "absent", is_made=False)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(UsageError, match=f"of user {user}, and this is user {user + 1}"):
        OwnFolder(folder)


def test_links_pipes_and_folders_are_no_files(tmp_path: Path) -> None:
    folder = OwnFolder(tmp_path / "kept")
    (tmp_path / "secret").write_text("secret")
    (folder.path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder.path / "pipe")
    (folder.path / "inner").mkdir()
    assert folder.entries() == []
    for name in ("link", "pipe", "inner"):
        with pytest.raises(OSError):
            folder.open(name)
    folder.close()


@pytest.mark.parametrize(
    ("number", "way_out"),
    [(errno.ENOSPC, "make room on its disk"), (errno.EACCES, "name a folder that you can write")],
)
def test_a_key_that_cannot_be_made_is_told_with_a_way_out(
    number: int, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = OwnFolder(tmp_path / "keys")

    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder, "writing", failing)
    with pytest.raises(StorageError, match=f"{os.strerror(number)}; {way_out}"):
        own_secret(folder, "key")
    folder.close()


def test_a_key_is_drawn_once_and_only_its_user_can_read_it(tmp_path: Path) -> None:
    folder = OwnFolder(tmp_path / "keys")
    key = own_secret(folder, "key")
    assert len(key) == SECRET_BYTES and own_secret(folder, "key") == key
    path = folder.path / "key"
    assert os.stat(path).st_mode & 0o777 == 0o600 and names(folder.path) == ["key"]
    path.chmod(0o644)
    with pytest.raises(StorageError, match="0644.*remove it"):
        own_secret(folder, "key")
    path.chmod(0o600)
    for content in (b"", key[1:], key + b"x"):
        path.write_bytes(content)
        with pytest.raises(StorageError, match="is not a key"):
            own_secret(folder, "key")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="cannot be used.*; remove it"):
        own_secret(folder, "key")
    path.unlink()
    assert own_secret(folder, "key") != key
    folder.close()


def test_a_key_that_another_program_draws_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = OwnFolder(tmp_path / "keys"), os.link
    path = folder.path / "key"

    def late(*arguments: Any, **others: Any) -> None:
        path.write_bytes(KEY)
        path.chmod(0o600)
        link(*arguments, **others)

    monkeypatch.setattr(os, "link", late)
    assert own_secret(folder, "key") == KEY and names(folder.path) == ["key"]
    folder.close()


def test_a_file_that_is_left_unfinished_is_none(tmp_path: Path) -> None:
    folder = OwnFolder(tmp_path / "kept")
    with pytest.raises(KeyError), folder.writing("name") as descriptor:
        os.write(descriptor, b"half")
        raise KeyError
    assert names(folder.path) == []
    with folder.writing("name") as descriptor:
        os.write(descriptor, b"whole")
    with pytest.raises(FileExistsError), folder.writing("name", is_new=True):
        pass
    assert (folder.path / "name").read_bytes() == b"whole" and names(folder.path) == ["name"]
    folder.close()


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 9)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 200),
)
def test_a_file_has_the_bytes_that_its_layout_says(shapes, itemsize, num_tokens) -> None:
    layout = KeyLayout(tuple(shapes), itemsize)
    chunks = layout.chunks(num_tokens)
    assert [token for chunk in chunks for token in chunk] == list(range(num_tokens))
    assert all(len(chunk) == layout.chunk_tokens for chunk in chunks[:-1])
    sizes = [layout.stored_bytes(len(chunk)) for chunk in chunks]
    assert all(size % BORDER_BYTES == 0 for size in sizes)
    head_bytes = layout.file_bytes(num_tokens) - sum(sizes)
    assert head_bytes % BORDER_BYTES == 0 and head_bytes >= 4 * num_tokens
