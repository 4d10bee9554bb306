"""Counts the workspace of passes by running the model's own forward without computing.

Tensors are on the meta device, and no weight is read. Passes of up to a tile of rows are registered
like the largest. For longer passes a template is fitted to a few samples; it plans any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import ModelConfig
from lowtide.core import Step, StepKind
from lowtide.decode.logits import LOGIT_ROWS
from lowtide.engine.opening.config import MAX_PASS_ROWS, EngineConfig
from lowtide.engine.opening.facts import ContextFacts, MemoryFacts
from lowtide.engine.planning.uncomputed import Uncomputed
from lowtide.experts.registrar import ExpertRegistrar
from lowtide.families import families
from lowtide.kernels.reference import REFERENCE
from lowtide.kernels.row_statistics import Form, Guidance, Wanted
from lowtide.layers.attention import QUERY_ROWS
from lowtide.layers.batch import Batch, KVRange, Segment
from lowtide.layers.causal_attention import CAUSAL_ROWS
from lowtide.memory.chunking import MAX_REMAINDER, TILE_ROWS, Counts, LogitNeeds
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.pass_planner import PassPlanner
from lowtide.memory.states import HALVES, StateStore
from lowtide.memory.template import Sample, Template
from lowtide.memory.transient_kv import TransientKV
from lowtide.memory.workspace import Registrar
from lowtide.models.decoder import Decoder
from lowtide.policies.presets import asks_scores, substitutes
from lowtide.threads.executor import MAX_THREADS, HostExecutor, InlineExecutor

EVERY_KIND = tuple(LogitNeeds(*flags) for flags in product((False, True), repeat=3))
"""All combinations of statistics of logits."""

META = torch.device("meta")


class PassWants(NamedTuple):
    """A policy's requirements that enlarge every pass' workspace."""

    substitutes: bool = False
    asks_scores: bool = False

    @classmethod
    def of(cls, policy: str, policy_options: Mapping[str, str]) -> PassWants:
        return cls(substitutes(policy, policy_options), asks_scores(policy, policy_options))


@dataclass(frozen=True, slots=True)
class _CountCache:
    """Cached counts of a model's passes, by everything they depend on."""

    registrars: dict[tuple[object, ...], Registrar] = field(default_factory=dict)
    pass_planners: dict[tuple[object, ...], PassPlanner] = field(default_factory=dict)


@dataclass(eq=False, frozen=True)
class Planner:
    """Counts the memory of a model's passes, by running them without computing; caches the counts.

    Knows nothing of budgets.
    """

    config: ModelConfig
    memory: MemoryFacts
    wants: PassWants
    max_chunks: int = 1  # of a prompt in one pass
    _counted: _CountCache = field(default_factory=_CountCache)  # all planners of a model share it

    @classmethod
    def of(cls, config: ModelConfig, memory: MemoryFacts, asked: EngineConfig) -> Planner:
        """Make the planner of a model under the policy of `asked`."""
        return cls(config, memory, PassWants.of(asked.policy, asked.policy_options))

    def wanting(self, wants: PassWants) -> Planner:
        """Return the same model's planner for another policy, sharing the cache."""
        return replace(self, wants=wants)

    def in_format(self, memory: MemoryFacts) -> Planner:
        """Return the planner of the same model in other formats, with the same counts.

        Formats are of weights, and passes take no more of the workspace for them.
        """
        return replace(self, memory=memory, max_chunks=1)

    def at_context(self, context: ContextFacts) -> Planner:
        """Return the same model's planner for another context, sharing the cache."""
        return replace(self, memory=replace(self.memory, context=context), max_chunks=1)

    def joining(self, max_chunks: int) -> Planner:
        """Return the same model's planner for passes of several chunks of a prompt, too."""
        return replace(self, max_chunks=max_chunks)

    def registrar(self, num_rows: int | None = None, form: Form = Form.FUSED) -> Registrar:
        """Count, once, the memory of passes of up to `num_rows` rows.

        num_rows: by default the largest pass'. Layers free what they take, so the layers up to the
        first with experts represent all. A pass of more than `MAX_PASS_ROWS` rows is bidirectional,
        over one whole sequence. form: how a bidirectional pass computes its logits.
        """
        segments = self._largest_segments(num_rows or self.memory.context.max_pass_rows)
        prompts = [] if num_rows else self._prompts_in_chunks()
        key = (form, self.wants, len(prompts) and self.max_chunks, *map(_sizes, segments))
        if key not in self._counted.registrars:
            self._counted.registrars[key] = registrar = Registrar()
            for prompt, chunk_ends in prompts:
                self.run_forward(registrar, [prompt], chunk_ends=chunk_ends)
            for segment in segments:
                model, hidden = self.run_forward(registrar, [segment])
                if not self.config.decoding.keeps_keys:
                    _run_head(model, hidden, len(hidden), EVERY_KIND, form)
        return self._counted.registrars[key]

    @property
    def pass_planner(self) -> PassPlanner | None:
        """The planner of passes by the memory that is free for them, made once.

        None if no pass is longer than a tile; then all passes get the memory of the largest.
        """
        if self.memory.context.max_pass_rows <= MAX_PASS_ROWS:
            return None
        key = (self.wants, *map(_sizes, self._largest_segments(MAX_PASS_ROWS)))
        if key not in self._counted.pass_planners:
            self._counted.pass_planners[key] = self.plan_long_passes()
        return self._counted.pass_planners[key]

    def plan_long_passes(self, form: Form = Form.FUSED) -> PassPlanner:
        """Make a planner of bidirectional passes, also of more than `MAX_PASS_ROWS` rows.

        form: as in `registrar`; forms other than the engine's are for ablations.
        """
        # Beside a device the host has room for one tile of its experts' rows.
        is_divided = self.memory.device != "cpu"
        return PassPlanner(
            self.registrar(MAX_PASS_ROWS, form).graph,
            Template.fit([self.forward_sample(*sample) for sample in self.samples()]),
            partial(self._head_template, form),
            frozenset({"experts"} if is_divided else ()),
        )

    @property
    def largest_counts(self) -> Counts:
        """The counts of a bidirectional model's largest pass, which fills the KV cache."""
        num_rows = self.memory.context.max_pass_rows
        return Counts(num_rows, num_rows, num_rows, num_rows, (EVERY_KIND[-1],))

    def workspace_bytes(self) -> tuple[int, int]:
        """Return the largest pass' workspace: with its operators fully divided, and undivided."""
        planner = self.pass_planner
        if planner is None:
            return (needed_bytes := self.registrar().graph.needed_bytes), needed_bytes
        return planner.least_bytes(self.largest_counts), planner.whole_bytes(self.largest_counts)

    def samples(self) -> list[tuple[Counts, Mapping[str, int]]]:
        """Return sample passes: counts of tokens, of a block and of keys; and chunks.

        Together they separate all terms that sizes depend on, tiles with remainders included; the
        last samples are checks.
        """
        # Keys that are there already, or where none are ever a second sequence beside a longer one.
        others = Counts(3600, 3072, 3072)
        if self.memory.context.keeps_keys:
            others = Counts(3072, 3072, 3600)
        return [
            (Counts(3072, 3072, 3072), {}),
            (Counts(4608, 4608, 4608), {}),
            (others, {}),
            (Counts(3080, 3080, 3080), {}),  # a remainder after tiles of 512 and of 768
            (Counts(2568, 2568, 2568), {}),  # of 512 alone
            (Counts(3072, 3072, 3072), {"mlp": 2}),
            (Counts(3072, 3072, 3072), {"experts": 2}),
            (Counts(3072, 3072, 3072), {"attention": 2}),
            (others._replace(tokens=3850, block=3072), {"mlp": 1, "experts": 3, "attention": 3}),
            (Counts(2600, 2600, 2600), {"mlp": 3, "experts": 1, "attention": 2}),
        ]

    def forward_sample(self, counts: Counts, chunks: Mapping[str, int]) -> Sample:
        block, num_keys, num_others = counts.block, counts.keys, counts.tokens - counts.block
        segments = [Segment(0, block, num_keys - block, num_keys, KVRange(0, num_keys))]
        if num_others:
            others = KVRange(num_keys, num_others)
            segments.append(Segment(block, counts.tokens, 0, num_others, others))
        registrar = Registrar(chunks)
        self.run_forward(registrar, segments)
        return Sample(counts, chunks, registrar.graph)

    def run_forward(
        self,
        registrar: Registrar,
        segments: Sequence[Segment],
        has_layers: bool = True,
        chunk_ends: tuple[int, ...] = (),
    ) -> tuple[Decoder, Tensor]:
        """Run a pass and the logits of a tile; return the model and its hidden states.

        chunk_ends: see `Batch`.
        """
        memory = self.memory
        config = self.config.first_layers(self.config.num_leading_layers)
        num_rows, num_tokens = segments[-1].stop, sum(one.kv.capacity for one in segments)
        kv_cache = _meta_cache(memory.context, memory.dtype, num_tokens)
        shape = self.config.moe_shape
        threads = InlineExecutor(num_threads(memory.device, shape.num_experts_per_token))
        compute = Compute(threads, REFERENCE, registrar, META)
        model_class = families()[config.family].model()
        rows = torch.empty(num_rows, dtype=torch.int64, device=META)
        with Uncomputed():
            experts = ExpertRegistrar(shape, *self.wants)
            model = model_class(config, memory.dense.meta(), experts, kv_cache, compute)
            if not has_layers:
                model.run_layers = range(0)
            step = Step(StepKind.DENOISE, 0)
            batch = Batch(rows, rows, tuple(segments), step, chunk_ends=chunk_ends)
            hidden = model.forward(batch)
            model.logits(hidden[: LOGIT_ROWS + MAX_REMAINDER])
        return model, hidden

    def _head_template(self, form: Form, asked: LogitNeeds) -> Template:
        samples = []
        for num_rows, chunks in _HEAD_SAMPLES:
            registrar = Registrar(chunks)
            segment = Segment(0, _HEAD_TOKENS, 0, _HEAD_TOKENS, KVRange(0, _HEAD_TOKENS))
            model, hidden = self.run_forward(registrar, [segment], has_layers=False)
            _run_head(model, hidden, num_rows, [asked], form)
            counts = Counts(_HEAD_TOKENS, _HEAD_TOKENS, _HEAD_TOKENS, num_rows, (asked,))
            samples.append(Sample(counts, chunks, registrar.graph))
        return Template.fit(samples)

    def _largest_segments(self, num_rows: int) -> list[Segment]:
        """Return passes whose transient memory no other pass of at most `num_rows` rows exceeds."""
        context, decoding = self.memory.context, self.config.decoding
        if not decoding.keeps_keys or num_rows > MAX_PASS_ROWS:
            # Where keys are kept, shorter passes see as many as the longest.
            is_whole = decoding.keeps_keys or not context.keeps_keys
            num_keys = num_rows if is_whole else max(num_rows, context.max_pass_rows)
            return [
                Segment(
                    start=0,
                    stop=rows,
                    first_position=0 if is_whole else num_keys - rows,
                    block_length=rows if is_whole else num_keys,
                    kv=KVRange(0, num_keys),
                )
                for rows in _longest_in_tiles(num_rows)
            ]
        # At the end of the longest sequence: causal, also with a remainder that joins its tile,
        # which is longer than any of all rows, or one block of all rows.
        num_tokens = max(context.max_sequence_tokens, num_rows)
        longest_tile = min(num_rows, CAUSAL_ROWS + MAX_REMAINDER)
        passes = [(longest_tile, 1), (num_rows, 1)]
        if not decoding.writes_in_order:
            passes.append((num_rows, num_tokens))
        return [
            Segment(0, rows, num_tokens - rows, block_length, KVRange(0, num_tokens))
            for rows, block_length in dict.fromkeys(passes)
        ]

    def _prompts_in_chunks(self) -> list[tuple[Segment, tuple[int, ...]]]:
        """Return passes over several chunks of a prompt, as `_largest_segments` does of one.

        The longest, and one in which a remainder joins its tile of attention.
        """
        if self.max_chunks == 1:
            return []
        most = MAX_PASS_ROWS
        lengths = [[most] * self.max_chunks]
        lengths.append([*lengths[0][1:], CAUSAL_ROWS + MAX_REMAINDER])
        found = []
        for each in lengths:
            ends = tuple(accumulate(each))
            num_tokens = max(self.memory.context.max_sequence_tokens, ends[-1])
            kv = KVRange(0, num_tokens)
            found.append((Segment(0, ends[-1], num_tokens - ends[-1], 1, kv), ends))
        return found


# Numbers of rows with logits, and of chunks of them, in a pass of `_HEAD_TOKENS` rows.
_HEAD_TOKENS = 2048
_HEAD_SAMPLES: tuple[tuple[int, Mapping[str, int]], ...] = (
    *((1024, {}), (1500, {}), (200, {}), (1024, {"logits": 1})),
    *((2000, {"logits": 2}), (90, {"logits": 1})),
)


def num_threads(device: str, experts_per_token: int) -> int:
    """Return the number of threads for a pass' dense operators; one beside a device."""
    return 1 if device != "cpu" else HostExecutor.count_threads(experts_per_token or MAX_THREADS)


def _sizes(segment: Segment) -> tuple[int, int, int]:
    """Return everything that the workspace of a pass over `segment` depends on."""
    return segment.stop, segment.block_length, segment.kv.capacity


def _meta_cache(context: ContextFacts, dtype: torch.dtype, num_tokens: int) -> KVCache:
    shape = context.kv_shape.at(num_tokens)
    if not context.keeps_keys:
        return TransientKV(shape, dtype)
    storage = [torch.empty(group, dtype=dtype, device=META) for group in shape.groups]
    states = None
    if (layout := context.state_layout(dtype)) is not None:
        layout = layout._replace(num_slots=HALVES)
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8, device=META)
        states = StateStore(layout, memory)
    return KVCache(storage, places=shape.places, states=states)


def _run_head(
    model: Decoder, hidden: Tensor, num_rows: int, kinds: Iterable[LogitNeeds], form: Form
) -> None:
    rows = torch.empty(num_rows, dtype=torch.int64, device=META)
    guidance = Guidance(rows, torch.empty(num_rows, device=META))
    with Uncomputed():
        for asked in kinds:
            wanted = Wanted(asked.second, asked.entropy)
            model.row_statistics(hidden, rows, wanted, guidance if asked.is_guided else None, form)


def _longest_in_tiles(num_rows: int) -> list[int]:
    """Return passes of up to `num_rows` rows: the longest, and those with the longest tiles."""
    most = num_rows - MAX_REMAINDER
    in_tiles = {
        most // tile_rows * tile_rows + MAX_REMAINDER for tile_rows in (TILE_ROWS, QUERY_ROWS)
    }
    return sorted({num_rows, *(rows for rows in in_tiles if rows > MAX_PASS_ROWS)})
