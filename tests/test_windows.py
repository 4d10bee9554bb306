"""Layers with a sliding window keep the last tokens alone, and no bit tells.

A model of hashes beside one whose layers keep everything, through whatever comes; then gpt-oss as a
whole model, beside itself with all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from examples import examples
from family_models import random_ids, write_model
from hash_model import WindowedHashModel, make_windowed_cache
from hypothesis import given
from hypothesis import strategies as st
from inside import engine_of, windows_of
from kind_decoders import causal_decoder
from test_kept_sequences import SYSTEM, Case, check_ranges, make_request, run

from lowtide import LLM, SamplingParams
from lowtide.core import Reuse
from lowtide.decode import sequence_writer
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.request import Finished, Request
from lowtide.decode.stored_sequences import StoredSequences
from lowtide.engine.planning.budget_division import SMALL_GROUP_BYTES
from lowtide.errors import InternalError
from lowtide.files import kept_file
from lowtide.files.kept_file import KeyLayout
from lowtide.files.own_folder import SECRET_BYTES, OwnFolder
from lowtide.files.stored_files import StoredFiles
from lowtide.llm import plan_model
from lowtide.memory import kv_cache as kv_cache_module
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.memory.kv_pages import GRANULE_TOKENS, KVLayout, KVShape, longest

WINDOWS = (0, 5, 40, 5)
CONTEXT, MAX_ROWS = 1024, 64
CASE = Case(1, Reuse.ON, CONTEXT, MAX_ROWS)
GIB = 1 << 30


# Shapes


def gemma(num_tokens: int) -> KVShape:
    """Thirty layers, of which five keep all tokens."""
    layers = [(2, 2, 512) if n % 6 == 5 else (2, 8, 256) for n in range(30)]
    windows = [0 if n % 6 == 5 else 1024 for n in range(30)]
    return KVShape.of(layers, num_tokens, windows, 512)


def test_a_cache_of_gemmas_shape_takes_less_than_a_gibibyte() -> None:
    shape, item_bytes = gemma(32768), torch.bfloat16.itemsize
    assert shape.num_elements * item_bytes < GIB
    assert shape.at(32768).num_elements * item_bytes > 6.8 * GIB
    [window] = shape.windows
    arrays = tuple((s.num_layers, s.num_arrays, s.num_heads, s.width) for s in shape.groups)
    of_window = (*window.storage[:3], window.storage.width)
    layout = KeyLayout(arrays, item_bytes, windows=((of_window, window.window),))
    assert layout.file_bytes(32768, 0, [32768 - window.cap]) < GIB


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 4, 33, 500]), st.integers(1, 3)), min_size=1),
    st.integers(1, 5000),
    st.integers(1, 600),
)
def test_each_layer_has_one_place_and_each_sequence_its_room(
    kinds: list[tuple[int, int]], num_tokens: int, max_rows: int
) -> None:
    layers = [(2, heads, 4) for _, heads in kinds]
    windows = [window for window, _ in kinds]
    shape = KVShape.of(layers, num_tokens, windows, max_rows)
    assert len({place for place in shape.places}) == len(layers)
    for layer, window, place in zip(layers, windows, shape.places, strict=True):
        storage = shape.storage[place.group]
        assert (storage.num_arrays, storage.num_heads, storage.width) == layer
        assert place.number < storage.num_layers
        is_capped = place.group >= len(shape.groups)
        if is_capped:
            of = shape.windows[place.group - len(shape.groups)]
            assert of.window == window and window - 1 + max_rows <= of.cap < num_tokens
            assert of.cap <= storage.num_tokens + GRANULE_TOKENS <= num_tokens + GRANULE_TOKENS
        else:
            assert storage.num_tokens == num_tokens
    assert shape.num_elements <= shape.at(num_tokens).num_elements
    assert not shape.at(num_tokens).windows


def test_paged_addresses_are_for_as_many_tokens_as_there_is_memory() -> None:
    shape = gemma(8192)
    grown = longest(shape, torch.bfloat16, 4 * GIB, SMALL_GROUP_BYTES)

    def address_bytes(shape: KVShape) -> int:
        layouts = [KVLayout(each, torch.bfloat16) for each in shape.storage]
        return sum(layout.address_bytes(SMALL_GROUP_BYTES) for layout in layouts)

    assert address_bytes(grown) <= 4 * GIB < address_bytes(grown.grown(grown.num_tokens + 16))
    assert longest(shape, torch.bfloat16, 0, SMALL_GROUP_BYTES) == shape


# The store


def written(cache: KVCache, kv: KVRange, first: int, stop: int) -> None:
    """A pass that writes each position's number to all layers."""
    cache.of_pass(kv, slice(0, stop - first), stop)
    rows = torch.arange(first, stop)[:, None, None]
    for layer in range(len(WINDOWS)):
        cache.write(layer, kv, first, rows, ~rows)


def seen(cache: KVCache, kv: KVRange, layer: int, num_tokens: int) -> list[int]:
    """What the next row sees before itself."""
    window = WINDOWS[layer] or num_tokens + 1
    keys, _ = cache.read(layer, kv, num_tokens, max(0, num_tokens + 1 - window))
    return keys.flatten().tolist()


def check_seen(cache: KVCache, kv: KVRange, num_tokens: int) -> None:
    for layer, window in enumerate(WINDOWS):
        first = max(0, num_tokens + 1 - (window or num_tokens + 1))
        assert seen(cache, kv, layer, num_tokens) == [*range(first, num_tokens)]


@pytest.mark.parametrize("is_paged", [False, True])
def test_a_window_slides_and_its_sequence_is_cut_where_it_still_is(is_paged: bool) -> None:
    cache = make_windowed_cache(4 * CONTEXT, WINDOWS, MAX_ROWS, is_paged)
    kv, at = cache.allocate(900), 0
    assert [window.capacity for window in kv.windows] == [96, 128]
    for num_rows in (64, 64, 64, 10, *[1] * 300):
        written(cache, kv, at, at + num_rows)
        at += num_rows
        check_seen(cache, kv, at)
        # At least the last pass can be undone, and any few of single tokens.
        least = at - (num_rows if num_rows > 1 else min(24, at - 202))
        assert cache.largest_cut(kv, least) == least
    with pytest.raises(InternalError, match="keeps positions from .* on, not from 0 on"):
        cache.read(1, kv, at)
    oldest = next(n for n in range(at) if cache.largest_cut(kv, n))
    assert (
        440 < oldest < 490
        and not cache.largest_cut(kv, oldest - 1)
        and not cache.largest_cut(kv, at, 400)
    )
    other = cache.branch(kv, oldest, 700)
    written(cache, other, oldest, oldest + 64)
    check_seen(cache, other, oldest + 64)
    check_seen(cache, kv, at)
    cache.keep(kv, at)
    with pytest.raises(InternalError, match="cannot be cut after 300 tokens"):
        cache.resume(kv, 300, 700)
    assert cache.is_kept(kv)
    cache.free(other)
    cache.resume(kv, oldest + 3, 700)
    written(cache, kv, oldest + 3, oldest + 60)
    check_seen(cache, kv, oldest + 60)


def test_a_pass_that_fails_behind_a_slide_is_run_again() -> None:
    cache = make_windowed_cache(CONTEXT, WINDOWS, MAX_ROWS)
    kv = cache.allocate(500)
    for first in range(0, 256, 64):
        written(cache, kv, first, first + 64)
    for _ in range(3):
        written(cache, kv, 256, 320)
    check_seen(cache, kv, 320)


def test_a_sequence_waits_for_room_in_a_window() -> None:
    cache = make_windowed_cache(CONTEXT, (0, 5, 5, 5, 5), MAX_ROWS)  # room of 128 tokens
    kv = cache.allocate(100)
    assert cache.can_allocate(32) and not cache.can_allocate(48)
    other = cache.allocate(32)
    assert not cache.grow(other, 48) and other.capacity == 32
    written(cache, kv, 0, 64)
    written(cache, kv, 64, 100)
    cache.keep(kv, 100)
    assert cache.can_allocate(600) and cache.grow(other, 48) and cache.is_kept(kv)
    assert cache.grow(other, 80) and not cache.is_kept(kv)


# Conversations


class Opened(NamedTuple):
    decoder: BatchDecoder[Any, Any]
    cache: KVCache


def opened(
    reuse: Reuse = Reuse.ON,
    max_rows: int = MAX_ROWS,
    is_paged: bool = False,
    num_tokens: int = CONTEXT,
    keeps_all: bool = False,
    windows: tuple[int, ...] = WINDOWS,
) -> Opened:
    most = 0 if keeps_all else max_rows
    cache = make_windowed_cache(num_tokens, windows, most, is_paged)
    model = WindowedHashModel(cache, max_rows, windows)
    return Opened(causal_decoder(model, cache, max_rows, reuse=reuse), cache)


def alone(
    request: Request, max_rows: int = MAX_ROWS, windows: tuple[int, ...] = WINDOWS
) -> Finished:
    """Its end where every layer keeps everything, and nothing was there before."""
    decoder, _ = opened(Reuse.OFF, max_rows, keeps_all=True, windows=windows)
    finished: dict[int, Finished] = {}
    decoder.add(request)
    run(decoder, 10_000, finished)
    return finished[request.id]


def ask(decoder: BatchDecoder[Any, Any], prompt: list[int], max_tokens: int = 8) -> Finished:
    """Ask and compare with the answer of the request alone."""
    finished: dict[int, Finished] = {}
    request = make_request(CASE, prompt, max_tokens, 0)
    decoder.add(request)
    run(decoder, 10_000, finished)
    assert replace(finished[request.id], num_resumed=0) == alone(request)
    return finished[request.id]


def test_a_next_turn_goes_on_where_the_answer_ended() -> None:
    decoder, _ = opened()
    text = SYSTEM * 2
    for turn in range(5):
        found = ask(decoder, text, 70)
        assert found.num_resumed == (len(text) - 8 if turn else 0)
        text = [*text, *found.token_ids, *SYSTEM[turn : turn + 7]]


def test_an_edit_behind_the_window_is_computed_again() -> None:
    decoder, _ = opened()
    text = SYSTEM * 2
    answer = ask(decoder, text, 100).token_ids
    assert ask(decoder, [*text, *answer[:90], 1, 2]).num_resumed == 490
    assert ask(decoder, [*text[:200], 1, 2]).num_resumed == 0


def test_a_next_turn_without_the_answer_goes_on_at_the_prompts_end() -> None:
    """As with templates that drop thoughts; and where another conversation left the prompt."""
    decoder, cache = opened(num_tokens=8 * CONTEXT)
    text = SYSTEM * 2
    for turn in range(4):
        found = ask(decoder, text, 150)
        assert found.num_resumed == (len(text) - 8 if turn else 0)
        text = [*text, *SYSTEM[turn : turn + 7]]
    [kept] = cache.kept
    assert kept.copies
    for number, num_resumed in ((1, 0), (2, 0), (3, 150)):
        text = [*SYSTEM[20:170], *[number] * 100]
        assert ask(decoder, text, 60).num_resumed == num_resumed


def test_exactly_means_at_the_ends_of_whole_passes() -> None:
    decoder, _ = opened(reuse=Reuse.EXACT, num_tokens=8 * CONTEXT)
    ask(decoder, SYSTEM * 2, 150)
    assert ask(decoder, [*SYSTEM * 2, 1, 2]).num_resumed == 384
    assert ask(decoder, SYSTEM[:60]).num_resumed == 0


def test_several_answers_share_the_prompt() -> None:
    decoder, _ = opened(num_tokens=8 * CONTEXT)
    requests = [make_request(CASE, SYSTEM * 2, 30, seed) for seed in range(4)]
    finished: dict[int, Finished] = {}
    for request in requests:
        decoder.add(request)
    run(decoder, 1000, finished)
    assert [finished[request.id].num_resumed for request in requests] == [0, *[384] * 3]
    for request in requests:
        assert replace(finished[request.id], num_resumed=0) == alone(request)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Of chunks of a few tokens; nothing is waited for before it is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_file, "CHUNK_BYTES", 1)
        patch.setattr(sequence_writer, "SETTLE_S", 0.0)
        yield


def stored_in(folder: Path, cache: KVCache, windows: tuple[int, ...] = WINDOWS) -> StoredSequences:
    files = StoredFiles(OwnFolder(folder), bytes(SECRET_BYTES), 1 << 30)
    num_capped = {w: windows.count(w) for w in windows if w}
    of_windows = tuple(((count, 2, 1, 1), w) for w, count in num_capped.items())
    whole = windows.count(0)
    layout = KeyLayout(((whole, 2, 1, 1),) if whole else (), 8, 0, of_windows)
    return StoredSequences(files, b"", "a model", cache, layout)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("windows", [WINDOWS, (7, 7, 20)])
def test_files_have_the_windows_alone(tmp_path: Path, windows: tuple[int, ...]) -> None:
    finished: dict[int, Finished] = {}
    request = make_request(CASE, SYSTEM * 3, 80, 0)
    for turn in range(3):
        decoder, cache = opened(windows=windows, is_paged=turn == 2)
        stored = stored_in(tmp_path, cache, windows)
        decoder.store_in(stored)
        decoder.add(request)
        run(decoder, 1000, finished)
        found = finished[request.id]
        assert replace(found, num_resumed=0) == alone(request, windows=windows)
        assert found.num_resumed == (len(request.prompt) - 8 if turn else 0)
        decoder.close()
        stored.close()
        text = [*request.prompt, *found.token_ids, *SYSTEM[:7]]
        request = make_request(CASE, text, 80, 0)
        num_tokens = len(text) - 8
        [file] = [path for path in tmp_path.iterdir() if path.stat().st_size > 10_000]
        whole = KeyLayout(((len(windows), 2, 1, 1),), 8).file_bytes(num_tokens)
        assert file.stat().st_size < whole * (0.25 + windows.count(0)) / len(windows) + 150 * 4096


class Drawn:
    """Conversations over one decoder, their answers beside those of a twin that keeps all."""

    def __init__(self, rng: Random, folder: Path) -> None:
        self.rng, self.folder = rng, folder
        self.windows = rng.choice((WINDOWS, (3, 0, 0), (1, 17, 60), (9, 9)))
        self.max_rows = rng.choice((16, 48, 64))
        self.reuse = rng.choice((Reuse.ON, Reuse.ON, Reuse.EXACT))
        is_paged, num_tokens = rng.random() < 0.5, rng.choice((512, CONTEXT, 4 * CONTEXT))
        self.decoder, self.cache = opened(
            self.reuse, self.max_rows, is_paged, num_tokens, windows=self.windows
        )
        layers = [(2, 1, 1)] * len(self.windows)
        shape = KVShape.of(layers, num_tokens, self.windows, self.max_rows)
        self.caps = [of_window.cap for of_window in shape.windows]
        self.stored = None
        if rng.random() < 0.5:
            self.stored = stored_in(folder, self.cache, self.windows)
            if len(self.caps) != len({*self.windows} - {0}):
                self.stored.close()  # some are as long as all that there is room for
                self.stored = None
        self.decoder.store_in(self.stored)
        self.asked: list[Request] = []
        self.finished: dict[int, Finished] = {}
        self.num_resumed = 0

    def take_turn(self) -> None:
        rng, prompt = self.rng, self.prompt()
        for sample in range(rng.choice((1, 1, 1, 2, 3, 8))):
            self.asked.append(make_request(CASE, prompt, rng.randint(1, 40), sample))
            self.decoder.add(self.asked[-1])
        self.run(rng.choice((0, 1, 3, 1000)))
        if rng.random() < 0.15:
            self.decoder.cancel(rng.choice(self.asked).id)
        if rng.random() < 0.2:
            if self.stored is not None:
                self.stored.drain()
            self.decoder.forget()

    def prompt(self) -> list[int]:
        rng = self.rng
        added = [rng.randrange(18) for _ in range(rng.randint(1, 24))]
        before = [request for request in self.asked if request.id in self.finished]
        if not before or rng.random() < 0.2:
            return (SYSTEM * 2)[: rng.randint(10, 300)] + added
        behind = rng.choice(before)
        text = [*behind.prompt, *self.finished[behind.id].token_ids]
        text = text[: max(1, len(text) - rng.choice((0, 0, 0, 1, 3, 7, 9, 20, 60)))]
        return text[: 440 - len(added)] + added

    def run(self, num_passes: int) -> None:
        for _ in range(num_passes):
            if not self.decoder.has_work:
                return
            for event in self.decoder.step():
                if isinstance(event, Finished):
                    self.finished[event.request] = event
            self.check()

    def check(self) -> None:
        """No two are in each other's place, in any store, and each has an owner."""
        check_ranges(self.cache)
        for index, (cap, stored) in enumerate(zip(self.caps, windows_of(self.cache), strict=True)):
            owned = [w for each in self.cache.taken for n, w in each.all_windows if n == index]
            assert {*map(id, owned)} == {*map(id, stored)}
            assert all(window.num_written <= window.capacity for window in owned)
            for one, next_one in pairwise(stored):
                assert one.start + one.capacity <= next_one.start
            for each in self.cache.taken:
                window = each.windows[index]
                assert window.capacity <= cap
                assert each not in self.cache.kept or window.stop == each.num_written

    def end(self) -> None:
        self.run(100_000)
        for request in self.asked:
            if found := self.finished.get(request.id):
                expected = alone(request, self.max_rows, self.windows)
                assert replace(found, num_resumed=0) == expected
                self.num_resumed += found.num_resumed > 0
        self.decoder.close()
        if self.stored is not None:
            self.stored.close()
        assert not self.cache.taken and not any(windows_of(self.cache))


@examples(60)
@given(st.integers(0, 1 << 20))
def test_drawn_conversations_are_those_of_a_twin_that_keeps_everything(seed: int) -> None:
    rng = Random(seed)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(kept_file, "CHUNK_BYTES", rng.choice((1, 4000)))
        patch.setattr(sequence_writer, "SETTLE_S", 0.0)
        patch.setattr(kv_cache_module, "GROWTH_TOKENS", rng.choice((16, 48)))
        drawn = Drawn(rng, Path(folder))
        for _ in range(rng.randint(2, 8)):
            drawn.take_turn()
        drawn.end()


def test_drawn_conversations_are_often_taken_up() -> None:
    num_resumed = num_asked = 0
    for seed in range(20):
        with TemporaryDirectory() as folder:
            drawn = Drawn(Random(seed), Path(folder))
            for _ in range(8):
                drawn.take_turn()
            drawn.end()
        if drawn.reuse is Reuse.ON:
            num_resumed += drawn.num_resumed
            num_asked += len(drawn.finished)
    assert num_resumed > 0.3 * num_asked


# A whole model


@pytest.fixture(scope="module", params=["gpt_oss", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with a window of eight tokens, in gpt-oss every other one, in bfloat16."""
    path, family = tmp_path_factory.mktemp(request.param), request.param
    changes = {"num_hidden_layers": 4, "sliding_window": 8, "max_position_embeddings": 4096}
    if family == "gpt_oss":
        changes["layer_types"] = None
    return write_model(family, 3, path, torch.bfloat16, **changes).folder


def opened_model(folder: Path, keeps_all: bool, **options: Any) -> LLM:
    """A model, or its twin in which every layer keeps everything."""
    with pytest.MonkeyPatch.context() as patch:
        if keeps_all:
            of = KVShape.of
            patch.setattr(KVShape, "of", lambda layers, num_tokens, *_: of(layers, num_tokens))
        llm = LLM(folder, **{"context": 2048, **options})
    assert (engine_of(llm).kv_cache.num_groups > 1) is not keeps_all
    return llm


def talks(llm: LLM, is_exact: bool) -> list[Any]:
    """Long prompts, several at once, next turns, an edit behind the windows, and logits.

    is_exact: what is taken over changes no bit; otherwise both take over the same.
    """
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    drawn = SamplingParams(max_tokens=700, temperature=1.0, seed=4, ignore_eos=True)
    text, said = random_ids(1, 900), []
    for prompt, params in ((text, greedy), (random_ids(2, 300), drawn)):
        [answer] = llm.generate([prompt], params)
        said.append(answer.token_ids)
        [following] = llm.generate([[*prompt, *answer.token_ids, 5, 6, 7]], greedy)
        said.append(following.token_ids)
    if is_exact:
        [edited] = llm.generate([[*text[:600], *text[100:300]]], greedy)
        said.append(edited.token_ids)
    several = [text[start : start + 150] for start in (50, 70, 300)]
    said += [answer.token_ids for answer in llm.generate(several, greedy)]
    return [*said, llm.logits(text)]


@pytest.mark.parametrize("is_paged", [False, True])
def test_ids_and_logits_are_those_of_a_cache_that_keeps_everything(
    folder: Path, is_paged: bool
) -> None:
    cache = "exact" if is_paged else "on"
    is_exact, options = is_paged, dict[str, Any](cache=cache)
    if is_paged:
        plan = plan_model(folder, context=2048)
        options["host_memory"] = plan.minimum_bytes + 6 * plan.host.slot_bytes
    with (
        opened_model(folder, False, **options) as llm,
        opened_model(folder, True, cache=cache) as twin,
    ):
        assert llm.plan.host.kv_cache_bytes < 0.8 * twin.plan.host.kv_cache_bytes
        assert "keep a sequence's last 544" in llm.plan.reason
        *found, logits = talks(llm, is_exact)
        *expected, expected_logits = talks(twin, is_exact)
    assert found == expected
    assert torch.equal(logits, expected_logits)


WINDOWED = {
    "mixtral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
}


@pytest.mark.parametrize("family", WINDOWED)
def test_words_far_behind_a_window_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompt and answer are longer than what layers with a window keep."""
    sizes = {"num_hidden_layers": 3, "max_position_embeddings": 4096}
    written = write_model(family, 3, tmp_path, **WINDOWED[family], **sizes)
    prompt, params = random_ids(3, 900), SamplingParams(max_tokens=200, ignore_eos=True)
    everywhere = plan_model(written.folder, context=2048, config_overrides={"sliding_window": 4096})
    with LLM(written.folder, context=2048) as llm:
        assert "keep a sequence's last 5" in llm.plan.reason
        assert llm.plan.host.kv_cache_bytes < 0.8 * everywhere.host.kv_cache_bytes
        read = llm.logits(prompt)
        words = llm.generate([prompt], params)[0].token_ids
    expected = written.oracle(prompt + words)
    torch.testing.assert_close(read, expected[:900], atol=2e-4, rtol=0)
    chosen = expected[899:-1].gather(1, torch.tensor(words)[:, None])[:, 0]
    assert (chosen >= expected[899:-1].amax(1) - 1e-4).all()


def test_a_conversation_goes_on_from_a_file_with_windows(folder: Path, tmp_path: Path) -> None:
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    text = random_ids(1, 900)
    with opened_model(folder, True) as twin:
        [first] = twin.generate([text], greedy)
        [second] = twin.generate([[*text, *first.token_ids, 5, 6, 7]], greedy)
    for turn, expected in enumerate((first, second)):
        prompt = [*text, *first.token_ids, 5, 6, 7] if turn else text
        with opened_model(folder, False, cache_dir=tmp_path / "kept") as llm:
            [answer] = llm.generate([prompt], greedy)
        assert answer.token_ids == expected.token_ids
        assert answer.usage.cached_tokens == (923 if turn else 0)
