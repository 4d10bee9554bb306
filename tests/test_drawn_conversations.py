"""Drawn conversations with every family that keeps keys.

Branches, edits in the middle, up to eight at once and more, `n` answers, cancelled and forgotten
ones; in memory that comes and goes or not, on disk or not.

Each pass has the bits that it has over keys, and states, of sequences that never end (`twins.py`).
Where keys are exact, and with a model of hashes in any case, an answer is that of its request alone
with nothing kept.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hash_model import MASK, HashModel, make_kv_cache
from inside import engine_of, states_of
from test_conversations import DEAR_KEYS, DEAR_SLOTS
from test_conversations import FAMILIES as CACHE_KINDS
from test_kept_sequences import SYSTEM, Case, check_ranges, decoder_over, make_request, run
from test_toy_family import CONFIG, FAMILY
from twins import Beside, Subject

from lowtide import LLM
from lowtide.core import Reuse
from lowtide.decode import batch_decoder, sequence_writer
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.logits import Model
from lowtide.decode.request import Finished, Request
from lowtide.decode.stored_sequences import StoredSequences
from lowtide.engine.planning.budget_division import SMALL_GROUP_BYTES
from lowtide.engine.running.decoding import run_pass
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.kept_room import KeptRoom
from lowtide.engine.running.moving_memory import kv_pages
from lowtide.families import SynthSize, families, register, unregister
from lowtide.files import kept_file, own_folder
from lowtide.files.kept_file import KeyLayout
from lowtide.files.own_folder import SECRET_BYTES, OwnFolder
from lowtide.files.stored_files import StoredFiles
from lowtide.llm import plan_model
from lowtide.memory import kv_cache as kv_cache_module
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.memory.kv_pages import KVLayout, StorageShape
from lowtide.memory.pages import PageBudget
from lowtide.memory.states import StateStore
from lowtide.model_writing.synth import write_checkpoint
from lowtide.policies import kept_keys

CONTEXT = 512
MAX_CANVAS = 240  # of a request; a conversation has room for one at least
MAX_ROWS = 256
TWIN_TOKENS = 1 << 14  # of all sequences of a conversation
MAX_LINEAGES = 200

HASHES = ("tokens", "blocks")
STATEFUL: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_5_moe": {"layer_types": ["linear_attention", "full_attention"]},
}
"""Families whose layers keep states, with what their models of two layers need."""

DENSE = "dense"
FAMILIES = (
    *HASHES,
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "bailing_moe_v2", "glm4_moe", "minimax_m2"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),  # latent keys
    "gpt_oss",  # windows
    *STATEFUL,
    "llada2",  # blocks
    DENSE,
)

FEW = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 16),
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
}
"""Of a tiny model, where it has more."""


class Kind(NamedTuple):
    """Model of a conversation, and the way in which its keys are kept."""

    family: str
    dtype: str
    is_tight: bool
    reuse: Reuse
    is_stored: bool


KINDS = [
    Kind(family, dtype, is_tight, reuse, is_stored)
    for dtype, names in (("bfloat16", FAMILIES), ("float32", CACHE_KINDS))
    for is_tight, reuse, is_stored, family in product(
        (False, True), (Reuse.ON, Reuse.EXACT), (False, True), names
    )
]
"""Conversation `i` is of kind `i` modulo their number."""


class Subjects:
    """Opens each when a conversation first asks for it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._found: dict[tuple[str, str, bool], Subject] = {}
        self._engines: dict[tuple[str, str, bool], Engine] = {}

    def of(self, kind: Kind) -> Subject:
        if kind[:3] not in self._found:
            make = self._hashes if kind.family in HASHES else self._whole
            self._found[kind[:3]] = make(*kind[:3])
        return self._found[kind[:3]]

    def _hashes(self, family: str, dtype: str, is_tight: bool) -> Subject:
        kv_cache, twin_cache = make_kv_cache(CONTEXT), make_kv_cache(TWIN_TOKENS)
        if is_tight:
            layout = KVLayout(StorageShape(2, 2, 1, 8 * CONTEXT, 1), torch.int64)
            pages = kv_pages(PageBudget(layout.address_bytes(SMALL_GROUP_BYTES)), [layout])
            self._stack.callback(pages.close)
            kv_cache = KVCache(pages.storage, pages, CONTEXT)
        model, twin = HashModel(kv_cache, MAX_ROWS), HashModel(twin_cache, MAX_ROWS)
        return Subject(model, kv_cache, twin, twin_cache)

    def _whole(self, family: str, dtype: str, is_tight: bool) -> Subject:
        """The twin is of the engine that has all experts in memory."""
        plain, engine = self._engine(family, dtype, False), self._engine(family, dtype, is_tight)
        model, context, own = plain.model, plain.planner.memory.context, plain.kv_cache.dtype
        shape, states = context.kv_shape.at(TWIN_TOKENS), None
        storage = [torch.zeros(group, dtype=own) for group in shape.groups]
        if layout := context.state_layout(own):
            layout = layout._replace(num_slots=2 * MAX_LINEAGES)
            states = StateStore(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
        twin_cache = KVCache(storage, places=shape.places, states=states)
        parts = (model.config, model.weights, plain.experts, twin_cache, model.compute)
        return Subject(engine.model, engine.kv_cache, type(model)(*parts), twin_cache, engine)

    def _engine(self, *key: Any) -> Engine:
        if key not in self._engines:
            family, dtype, is_tight = key
            # The context is that of one sequence where experts give way.
            options: dict[str, Any] = {"dtype": dtype, "context": CONTEXT >> is_tight}
            folder = self._checkpoint(family)
            if is_tight and family != DENSE:
                plan = plan_model(folder, **options)
                options["host_memory"] = plan.minimum_bytes + 6 * plan.host.slot_bytes
            llm = self._stack.enter_context(LLM(folder, **options))
            self._engines[key] = engine_of(llm)
        return self._engines[key]

    def _checkpoint(self, family: str) -> Path:
        folder = self._folder / family
        if folder.exists():
            return folder
        if family == DENSE:
            return write_checkpoint(SynthSize({**CONFIG, "num_toys": 0}, 304, 1 << 20), folder)
        size = families()[family].sizes()["tiny"]
        config = {name: FEW.get(name, value) for name, value in size.config.items()}
        config["num_hidden_layers"] += config.get("first_k_dense_replace", 0)
        config |= STATEFUL.get(family, {})
        return write_checkpoint(replace(size, config=config), folder, seed=5)


class Talk:
    """A conversation with all its branches, over one decoder."""

    def __init__(self, kind: Kind, subject: Subject, rng: Random, folder: Path) -> None:
        self._kind, self._subject, self._rng = kind, subject, rng
        block_length = {"blocks": rng.choice((4, 6)), "llada2": 8}.get(kind.family, 1)
        most_rows = (32, 48, 64) if kind.reuse is Reuse.EXACT else (32, 64, MAX_ROWS)
        self._case = Case(block_length, kind.reuse, CONTEXT, rng.choice(most_rows))
        self._mask = MASK
        if subject.engine is not None:
            self._mask = subject.engine.model.config.decoding.mask_token_id or 0
        self._beside = Beside(subject)
        self._decoder = self._decoder_over(self._beside, subject.kv_cache, kind.reuse)
        self._beside.decoder = self._decoder
        self._stored: StoredSequences | None = None
        if kind.is_stored:
            most_bytes = rng.choice((200_000, 1 << 30))
            files = StoredFiles(OwnFolder(folder), bytes(SECRET_BYTES), most_bytes)
            cache = subject.kv_cache
            first, *_ = cache.rows(KVRange(0, 1), 0, 1)
            layers, arrays, heads, _, width = first.shape
            shapes = ((layers, arrays, heads, width),)
            layout = KeyLayout(shapes, cache.dtype.itemsize, cache.snapshot_bytes)
            self._stored = StoredSequences(files, b"", "a model", cache, layout)
        self._decoder.store_in(self._stored)
        num_others = min(rng.choice((16, 128, 208)), subject.kv_cache.num_tokens - MAX_CANVAS)
        self._others = subject.kv_cache.allocate(num_others)  # there is less room for keys alone
        if self._others.states is not None:
            states_of(subject.kv_cache).free(*self._others.states.slots)
            self._others.states = None
        self._asked: list[Request] = []
        self._second: set[int] = set()  # those asked behind an earlier answer
        self._finished: dict[int, Finished] = {}
        self.met: Counter[str] = Counter()

    def take_turn(self) -> None:
        """Asks behind an earlier answer, or in a new conversation, and runs some passes."""
        rng, is_forgotten = self._rng, self._rng.random() < 0.2
        if is_forgotten:
            if self._stored is not None:
                self._stored.drain()
            self._decoder.forget()
        is_from_disk = is_forgotten and self._stored is not None and not self._decoder.has_work
        (prompt, is_second), max_tokens = self._prompt(), rng.randint(1, 12)
        for sample in range(rng.choice((1, 1, 1, 2, 3, 8))):
            self._asked.append(make_request(self._case, prompt, max_tokens, sample))
            if is_second:
                self._second.add(self._asked[-1].id)
            self._decoder.add(self._asked[-1])
        self._run(1)
        if is_from_disk:
            self.met["from disk"] += any(s.num_resumed for s in self._decoder.running)
        self._run(rng.choice((0, 2, 1000, 1000)))
        if rng.random() < 0.12:
            self.met["cancelled"] += self._decoder.cancel(self._asked[-1].id)
        self._check_memory()

    def end(self) -> None:
        """Lets all come to their end, and checks what they are."""
        self._run(100_000)
        for request in self._asked:
            if found := self._finished.get(request.id):
                self._check(request, found)
        self._decoder.close()
        assert self._subject.kv_cache.taken == (self._others,)

    def clear(self) -> None:
        """After a failure, too, nothing is left to the next one."""
        if self._stored is not None:
            self._stored.close()
        for cache in (self._subject.kv_cache, self._subject.twin_cache):
            for taken in [*cache.taken]:
                cache.free(taken)

    def _decoder_over(self, model: Model, kv_cache: KVCache, reuse: Reuse) -> BatchDecoder[Any]:
        return decoder_over(model, kv_cache, self._case, reuse, self._mask)

    def _prompt(self) -> tuple[list[int], bool]:
        """Tokens, and whether an earlier answer is among them."""
        rng = self._rng
        added = [rng.randrange(MASK) for _ in range(rng.randint(1, 24))]
        before = [request for request in self._asked if request.id in self._finished]
        if not before or rng.random() < 0.2:
            return SYSTEM[: rng.randint(30, 110)] + added, False
        behind = rng.choice(before)
        text = [*behind.prompt, *self._finished[behind.id].token_ids]
        text = text[: max(1, len(text) - rng.choice((0, 0, 0, 1, 3, 7, 20, 60)))]
        return text[: MAX_CANVAS - 12 - len(added)] + added, True

    def _run(self, num_passes: int) -> None:
        for _ in range(num_passes):
            if not self._decoder.has_work:
                return
            engine = self._subject.engine
            self.met["eight at once"] += self._decoder.num_requests >= 8
            events = self._decoder.step() if engine is None else run_pass(engine, self._decoder)
            self._finished |= {e.request: e for e in events if isinstance(e, Finished)}
            self._check_memory()

    def _check(self, request: Request, found: Finished) -> None:
        assert 0 <= found.num_resumed <= len(request.prompt)
        self.met["resumed"] += found.num_resumed > 0
        is_exact = self._kind.reuse is Reuse.EXACT
        if request.id in self._second and not is_exact:
            self.met["second turns"] += 1
            self.met["taken up"] += found.num_resumed > 0
        if is_exact:
            block_length = self._case.block_length
            assert not found.num_resumed % (self._case.max_rows // block_length * block_length)
        is_alone = request.id not in self._beside.in_company
        self.met["in company"] += not is_alone
        if self._kind.family in HASHES or (is_exact and is_alone and found.num_resumed):
            self.met["exact"] += 1
            assert replace(found, num_resumed=0) == self._alone(request)

    def _alone(self, request: Request) -> Finished:
        """Its end with nothing kept."""
        alone = self._decoder_over(self._subject.twin, self._subject.twin_cache, Reuse.OFF)
        alone.add(request)
        finished: dict[int, Finished] = {}
        run(alone, 100_000, finished)
        return finished[request.id]

    def _check_memory(self) -> None:
        """No range is in another's place, and all that is shared is within the plan."""
        cache, engine = self._subject.kv_cache, self._subject.engine
        check_ranges(cache)
        if engine is None or engine.moving is None:
            return
        shared = engine.moving.shared
        assert shared.budget.num_free_bytes >= 0
        assert shared.kv.committed_bytes == shared.kv.account.num_bytes
        assert shared.arena.committed_bytes == shared.slots_account.num_bytes
        assert shared.slots.num_live >= engine.plan.num_staging
        tier, windows = engine.plan.fast_tier, engine.planner.memory.context.kv_shape.windows
        window_bytes = [KVLayout(each.storage, cache.dtype).token_bytes for each in windows]
        unit_bytes = cache.token_bytes or sum(window_bytes)
        num_tokens = sum(bytes_of(each, cache, window_bytes) // unit_bytes for each in cache.taken)
        is_planned = num_tokens * unit_bytes <= tier.kv_cache_bytes + tier.state_bytes
        assert is_planned or not cache.kept or shared.kept.prices


def bytes_of(kv_range: KVRange, cache: KVCache, window_bytes: list[int]) -> int:
    """Bytes of a sequence's keys and states that can be in use."""
    num_states = 0 if kv_range.states is None else kv_range.states.num_held
    windows = sum(window_bytes[index] * each.num_usable for index, each in kv_range.all_windows)
    return cache.token_bytes * kv_range.num_usable + cache.snapshot_bytes * num_states + windows


def converse(number: int, subjects: Subjects) -> Counter[str]:
    """Holds one of them; what was met on the way."""
    kind, rng = KINDS[number % len(KINDS)], Random(number)
    prices = rng.choice((None, DEAR_KEYS, DEAR_SLOTS))
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(KeptRoom, "prices", prices),
        patch.object(batch_decoder, "ROOM_TOKENS", rng.choice((4, 16, 256))),
    ):
        talk = Talk(kind, subjects.of(kind), rng, Path(folder))
        try:
            for _ in range(rng.randint(2, 6)):
                talk.take_turn()
            talk.end()
        except BaseException as error:
            error.add_note(f"Conversation {number}, {kind}.")
            raise
        finally:
            talk.clear()
    return talk.met


def check_conversations(numbers: Iterable[int], subjects: Subjects) -> Counter[str]:
    met: Counter[str] = Counter()
    for number in numbers:
        met += converse(number, subjects)
    assert set(met) >= {"resumed", "in company", "exact", "eight at once"}
    return met


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subjects]:
    """Models under limits so small that short conversations reach them.

    A chunk of the file has one row, memory grows by 32 tokens, and keys wait for four passes.
    Nothing waits before it is written or while it is.
    """
    register(FAMILY)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as monkeypatch:
        stack.callback(unregister, FAMILY.name)
        monkeypatch.setattr(kept_file, "CHUNK_BYTES", 1)
        monkeypatch.setattr(sequence_writer, "SETTLE_S", 0.0)
        monkeypatch.setattr(own_folder.os, "fdatasync", lambda descriptor: None)
        monkeypatch.setattr(kv_cache_module, "GROWTH_TOKENS", 32)
        monkeypatch.setattr(kept_keys, "YOUNG_PASSES", 4)
        yield Subjects(tmp_path_factory.mktemp("models"), stack)


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_conversations(family: str, subjects: Subjects) -> None:
    """Of all families 320, and more of those with states, which are often cut."""
    most = 720 if family in STATEFUL else 320
    numbers = [i for i in range(most) if KINDS[i % len(KINDS)].family == family]
    met = check_conversations(numbers, subjects)
    assert family not in STATEFUL or met["taken up"] > 0.3 * met["second turns"], met


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_drawn_conversations(part: int, subjects: Subjects) -> None:
    """Each part has all kinds."""
    check_conversations(range(500 * part, 500 * (part + 1)), subjects)
