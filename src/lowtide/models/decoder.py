"""The decoder that all families share: embedding, layers, last norm, head.

A family defines its attention, router and shared expert, and their tensor names. Its layers are
usually `x += attention(norm(x))`, then `x += mlp(norm(x))`; it may write others (`Block`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import ClassVar, NamedTuple, Protocol, final

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import AttentionSpec, LayerSpec, ModelConfig
from lowtide.core import Step, StepKind
from lowtide.errors import InternalError
from lowtide.experts.rows import LayerCall, Routing
from lowtide.kernels.layer_parts import LayerParts, MixerParts
from lowtide.kernels.operands import HeadNorms, Matrix
from lowtide.kernels.row_statistics import Form, Guidance, RowStatistics, Wanted
from lowtide.layers.batch import Batch
from lowtide.layers.few_rows import (
    MAX_SHORT_ROWS,
    ShortPass,
    WholeLayer,
    WholeModel,
    layer_parts,
    take_block,
)
from lowtide.layers.head import LogitsHead
from lowtide.layers.linear import MLP, GatedMLP, Linear, SquaredMLP
from lowtide.layers.moe import ModelExperts, MoELayer
from lowtide.layers.norm import Norm
from lowtide.layers.projection import Projection
from lowtide.layers.rotary import Rotary, Rotations
from lowtide.layers.router import Router, SoftmaxRouter
from lowtide.layers.rows import in_chunks
from lowtide.layers.self_attention import GroupedAttention
from lowtide.memory.chunking import Counts
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import TILE_ROWS
from lowtide.models.captured_passes import CapturedPasses
from lowtide.schemas.names import PROJECTIONS, USUAL, Names

Weights = Mapping[str, Matrix]
"""Dense weights by checkpoint names; those only used in products may have any format."""


class Attention(Protocol):
    """A layer's attention, including its projections."""

    def parts(self, norm: Norm) -> MixerParts | None:
        """Return parts for kernels of whole layers; None if no kind of them suffices."""
        ...

    def forward(self, x: Tensor, norm: Norm, batch: Batch, rotations: Rotations) -> None:
        """Compute `x += attention(norm(x))`, x [rows, hidden] in the compute dtype.

        Writes all rows' keys and values.
        """
        ...


class Chunk(NamedTuple):
    """One of several chunks of a prompt that go through a layer one after the other."""

    rows: slice  # of the pass
    batch: Batch  # that it would be alone
    rotations: Rotations


class Block:
    """One layer, whose `forward` is a short list of statements.

    What they take of the workspace lives until their scope ends. Many rows go through an MLP in
    chunks (`in_chunks`); attention and experts divide theirs themselves.
    """

    parts: LayerParts | None = None
    """Parts of the layer for kernels that run it whole; None for a layer unlike the usual ones."""

    whole: WholeLayer | None = None
    """The layer for these kernels; None if they lack it."""

    def forward(
        self, x: Tensor, batch: Batch, rotations: Rotations, short: ShortPass | None
    ) -> None:
        """Compute the layer: x [rows, hidden], updated in place.

        short: the short pass, if the kernels take the rows; for `whole` alone.
        """
        raise NotImplementedError

    def forward_chunks(self, x: Tensor, chunks: Sequence[Chunk]) -> None:
        """Compute the layer for several chunks of a prompt, with the bits of `forward` for each.

        x [rows, hidden], of all chunks, updated in place.
        """
        raise NotImplementedError

    def register_experts(self, x: Tensor, config: ModelConfig, step: Step) -> None:
        """Register the memory of a `whole` layer's experts, if it has any, on the meta device."""


class Decoder:
    """The model: `forward` computes hidden states, `logits` the rows that are wanted."""

    names: ClassVar[Names] = USUAL
    rotation_dtype: ClassVar[torch.dtype | None] = None  # None: the compute dtype

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        experts: ModelExperts,
        kv_cache: KVCache,
        compute: Compute,
    ) -> None:
        self.config = config
        self.weights = weights
        self.kv_cache = kv_cache
        self.compute = compute
        self._experts = experts
        self.num_rows = 0  # in all passes so far
        self.num_prompt_rows, self.prompt_s = 0, 0.0  # in passes over prompts alone
        names, is_tied = self.names, config.tie_word_embeddings
        self._embedding = weights[f"{names.embedding}.weight"]
        head = self._embedding if is_tied else weights[f"{names.head}.weight"]
        norm = self.tensor(f"{names.norm}.weight")
        *_, factor, cap = config.multipliers
        self._head = LogitsHead(norm, config.rms_norm_eps, head, compute, factor, cap)
        self._rotaries = {
            rope: Rotary(
                rope.rotary_dim, rope.theta, self._embedding.device, rope.yarn, rope.divisors
            )
            for rope in config.ropes
        }
        self.routers: list[Router] = []  # of the layers that have experts
        self._blocks = [self.block(layer) for layer in range(config.num_layers)]
        self._layer_parts = [block.parts for block in self._blocks if block.parts is not None]
        self._short_pass: ShortPass | None = None  # the last
        self._whole_model = WholeModel.of([block.whole for block in self._blocks], experts)
        self.run_layers = range(config.num_layers)  # a measurement of speed runs the last few
        self._captured: CapturedPasses | None = None
        can_capture = config.decoding.keeps_keys and not any(
            router.looks_at_positions for router in self.routers
        )
        if compute.recorder is not None and can_capture:
            self._captured = CapturedPasses(compute, experts)

    @property
    def device(self) -> torch.device:
        """Device of the dense weights and of the computation."""
        return self._embedding.device

    @property
    def runs_at_once(self) -> bool:
        """True if a pass of one row per sequence is one compiled call over all layers."""
        return self._whole_model is not None

    def tensor(self, name: str) -> Tensor:
        """Return a weight that must be a plain tensor."""
        weight = self.weights[name]
        if not isinstance(weight, Tensor):
            raise InternalError(f"{name} is kept in a format that only products know.")
        return weight

    @staticmethod
    def is_float32(name: str) -> bool:
        """Return True if a dense weight is kept in float32 for any compute dtype."""
        return False

    @staticmethod
    def adjust(name: str, weight: Tensor) -> None:
        """Change a dense weight in place as it was loaded, where files store another number.

        An example is a norm that multiplies by 1 + w, kept in float32. It is not called where a
        config `is_adjusted`, as that of a GGUF file may be.
        """

    def block(self, layer: int) -> Block:
        """Make a layer, by default of a norm before its mixer and a norm before its MLPs.

        A part that its `LayerSpec` lacks is left out, with its norm.
        """
        return _UsualBlock(self, layer)

    def attention(self, layer: int) -> Attention:
        """Make the attention of a layer, by default over separate projections.

        Norms of queries and keys, if any, come before the rotation: per head [head_dim], or over
        all heads.
        """
        prefix = self.names.layer(layer)
        norms = None
        if self.config.mixer(AttentionSpec, layer).has_qk_norm:
            both = (self.tensor(f"{prefix}{name}.weight") for name in self.names.qk_norms)
            norms = HeadNorms(*both)
        return GroupedAttention(
            layer,
            self.config,
            self.separate_qkv(layer),
            self.linear(prefix + self.names.output),
            norms,
            self.kv_cache,
            self.compute,
        )

    def router(self, layer: int) -> Router:
        """Make the router of a layer with experts.

        By default it is linear at `mlp.gate`, under a softmax whose weights are rounded to the
        compute dtype.
        """
        return SoftmaxRouter(
            self.compute,
            weight=self.tensor(f"{self.names.layer(layer)}mlp.gate.weight"),
            num_experts_per_token=self.config.moe.num_experts_per_token,
            normalise=self.config.moe.norm_topk_prob,
            rounds_weights=True,
        )

    def moe(self, layer: int) -> MoELayer:
        """Make the experts of a layer, and their router; once, and in the order of layers."""
        self.routers.append(self.router(layer))
        index = self.config.moe_layers.index(layer)
        shared = self.shared_expert(layer)
        return MoELayer(index, self.routers[-1], self._experts, self.compute, *shared)

    def shared_expert(self, layer: int) -> tuple[GatedMLP | None, Tensor | None]:
        """Return the shared expert of a layer and the gate [1, hidden] of its output, if any."""
        if self.config.experts is None or not self.config.experts.shared_size:
            return None, None
        return self.mlp(f"model.layers.{layer}.mlp.shared_experts."), None

    def linear(self, name: str) -> Linear:
        """Make the product with `name.weight`, plus `name.bias` if it exists."""
        return Linear(self.weights[f"{name}.weight"], self.compute, self._bias(name))

    def mlp(
        self,
        prefix: str,
        names: tuple[str, str, str] = PROJECTIONS,
        activation: str = "silu",
    ) -> GatedMLP:
        """Make the gated MLP of the weights whose names begin with `prefix`."""
        gate, up, down = (self.weights[f"{prefix}{name}.weight"] for name in names)
        return GatedMLP(gate, up, down, self.compute, activation)

    def dense_mlp(self, layer: int) -> MLP:
        """Make the MLP of a layer that every token uses."""
        spec, prefix = self.config.layers[layer].dense, self.names.layer(layer)
        activation = "silu" if spec is None else spec.activation
        if activation == "relu2":
            up, down = (self.weights[f"{prefix}{name}.weight"] for name in self.names.mlp[1:])
            return SquaredMLP(up, down, self.compute)
        return self.mlp(prefix, self.names.mlp, activation)

    @final
    def norm(self, name: str) -> Norm:
        """Make the RMS norm with the named weight.

        Families cannot replace it: compiled layers and the head use only its weight and epsilon.
        """
        return Norm(self.tensor(name), self.config.rms_norm_eps, self.compute)

    def fused_qkv(self, layer: int, name: str) -> Projection:
        """Make a layer's projection of queries, keys and values by one weight, `name.weight`."""
        weight, spec = self.weights[f"{name}.weight"], self.config.mixer(AttentionSpec, layer)
        return Projection.fused(weight, self._bias(name), spec, self.compute)

    def separate_qkv(self, layer: int) -> Projection:
        """Make the separate projections of queries, keys and values."""
        prefix = self.names.layer(layer)
        return Projection.separate(*(self.linear(prefix + name) for name in self.names.qkv))

    def forward(self, batch: Batch) -> Tensor:
        """Compute every row's hidden states before the last norm, valid until the next `forward`.

        Returns [rows, hidden] in the compute dtype; writes all rows' keys and values. Raises
        PlanError if there is no room for the pass.
        """
        start_s, batch = perf_counter(), batch.placed(self.kv_cache)
        workspace = self.compute.workspace
        workspace.begin(batch.counts)
        num_rows, dtype = batch.token_ids.shape[0], self.kv_cache.dtype
        self.num_rows += num_rows
        x = workspace.take("hidden", (num_rows, self.config.hidden_size), dtype)
        self._hidden_end = workspace.state
        self._experts.begin_pass(batch.step)
        run = partial(self._run, x, batch)
        if self._captured is None or batch.chunk_ends or len(self.run_layers) < len(self._blocks):
            run(*self.compute.to_device(batch.token_ids, batch.positions))
        else:
            self._captured.run(batch, run)
        self._experts.end_pass()
        workspace.state = self._hidden_end
        if batch.step.kind is StepKind.PREFILL:
            self.num_prompt_rows += num_rows
            self.prompt_s += perf_counter() - start_s
        return x

    def _run(self, x: Tensor, batch: Batch, token_ids: Tensor, positions: Tensor) -> None:
        """Run all layers: x [rows, hidden], of these tokens and positions [rows] on its device."""
        self.compute.kernels.select_rows(self._embedding, token_ids, x)
        if self.config.multipliers.embedding != 1:
            x.mul_(self.config.multipliers.embedding)
        rotations = self._rotations(positions)
        if x.is_meta and x.dtype is torch.bfloat16 and len(x) <= TILE_ROWS:
            self._register_short_pass(x, batch)
        short = self._begin_short_pass(x, batch, rotations)
        if batch.chunk_ends:
            self._run_chunks(x, replace(batch, positions=positions))
        elif not self._runs_whole(short):
            for layer in self.run_layers:
                self._blocks[layer].forward(x, batch, rotations, short)

    def run_experts(self, layer: int, x: Tensor, routing: Routing, step: Step) -> Tensor:
        """Compute a MoE layer's routed experts alone, for given rows.

        `layer` counts MoE layers; x [rows, hidden] compute dtype. Returns float32 [rows, hidden],
        valid until the next call.
        """
        workspace = self.compute.workspace
        workspace.begin(Counts(tokens=len(x), block=len(x), keys=0))
        out = workspace.take("routed", tuple(x.shape), torch.float32)
        self._experts.begin_pass(step)
        self._experts.forward(LayerCall(layer, x, routing, step, workspace, out))
        self._experts.end_pass()
        return out

    def mixes_rows(self, hidden: Tensor) -> bool:
        """Return True if a row's logits may depend on the number of rows [n, hidden].

        torch's products may, compiled ones do not.
        """
        return not self._head.divides(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits [n, vocab] of hidden [n, hidden], valid until the next call."""
        workspace = self.compute.workspace
        workspace.state = self._hidden_end
        shape = (hidden.shape[0], self.config.vocab_size)
        logits = workspace.take("logits", shape, torch.float32)
        self._head.logits(hidden, logits)
        return logits

    def row_statistics(
        self,
        hidden: Tensor,
        rows: Tensor,
        wanted: Wanted,
        guidance: Guidance | None = None,
        form: Form = Form.FUSED,
    ) -> RowStatistics:
        """Compute statistics of the logits of hidden[rows], valid until the next call.

        hidden [tokens, hidden]; rows [n] int64 and guidance on the same device. The logits are
        those of `logits`, and no row's bits depend on which others are asked for. Unless they must
        be materialised, only tiles of them ever exist.
        """
        self.compute.workspace.state = self._hidden_end
        return self._head.statistics(hidden, rows, wanted, guidance, form)

    def _run_chunks(self, x: Tensor, batch: Batch) -> None:
        """Run several chunks of a prompt: each layer for all of them, then the next layer.

        Every operator has the rows of one chunk, as in a pass over it alone, and so the same bits.
        Absent experts are read once for all chunks.
        """
        chunks = [Chunk(rows, own, self._rotations(own.positions)) for rows, own in batch.chunks()]
        for num_done, layer in enumerate(self.run_layers, 1):
            self._blocks[layer].forward_chunks(x, chunks)
            batch.on_layer(num_done / len(self.run_layers))

    def _rotations(self, positions: Tensor) -> Rotations:
        dtype = self.rotation_dtype or self.kv_cache.dtype
        return Rotations(self._rotaries, positions, dtype, self.compute.workspace)

    def _register_short_pass(self, x: Tensor, batch: Batch) -> None:
        """Take what a short pass takes, with its experts run by the runtime, and give it back.

        A plan has room for it whether kernels are compiled or not.
        """
        x = x[:MAX_SHORT_ROWS]
        with self.compute.workspace.scope():
            take_block(self.compute.workspace, self._layer_parts, len(x))
            for block in self._blocks:
                block.register_experts(x, self.config, batch.step)

    def _begin_short_pass(self, x: Tensor, batch: Batch, rotations: Rotations) -> ShortPass | None:
        """Return the short pass of x [rows, hidden], or None if the kernels do not take the rows.

        It is reused as long as the workspace hands out the same memory for the rows, that is until
        its plan or their number changes.
        """
        if not self.compute.kernels.takes_rows(x) or not self._rotaries:
            return None
        if self._short_pass is None or self._short_pass.x is not x:
            rope = next(iter(self._rotaries))  # of `config.ropes`, in their order
            self._short_pass = ShortPass(x, rope, self.compute, self._layer_parts)
        self._short_pass.begin(batch, rotations, self.kv_cache, self.run_layers)
        return self._short_pass

    def _runs_whole(self, short: ShortPass | None) -> bool:
        """Run all layers in one call; False where they are to be called one by one."""
        if short is None or self._whole_model is None or len(self.run_layers) < len(self._blocks):
            return False
        return self._whole_model.run(short)

    def _bias(self, name: str) -> Tensor | None:
        return self.tensor(f"{name}.bias") if f"{name}.bias" in self.weights else None


def _of_each_length(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return a chunk of each length, for a pass that is only counted."""
    return list({len(chunk.batch.token_ids): chunk for chunk in chunks}.values())


def _is_usual(spec: LayerSpec) -> bool:
    """Return True for one MLP, with a function that kernels of whole layers have."""
    mlps = [mlp for mlp in (spec.dense, spec.experts) if mlp is not None]
    return len(mlps) == 1 and mlps[0].activation in ("silu", "clamped")


class _UsualBlock(Block):
    """Adds its attention, then its MLP: a dense one, experts, or both on the same hidden states."""

    def __init__(self, decoder: Decoder, layer: int) -> None:
        spec, names = decoder.config.layers[layer], decoder.names
        prefix, compute = names.layer(layer), decoder.compute
        self._moe = None if spec.experts is None else decoder.moe(layer)
        self._dense = None if spec.dense is None else decoder.dense_mlp(layer)
        self._attention, self._attention_norm, mixer = None, None, None
        if spec.mixer is not None:
            self._attention = decoder.attention(layer)
            self._attention_norm = decoder.norm(f"{prefix}{names.attention_norm}.weight")
            mixer = self._attention.parts(self._attention_norm)
        self._mlp_norm = None
        self._factor = decoder.config.multipliers.residual
        if spec.mlp is not None:
            self._mlp_norm = decoder.norm(f"{prefix}{names.mlp_norm}.weight")
            dense = self._dense if isinstance(self._dense, GatedMLP) else None
            if spec.mixer is not None and self._factor == 1 and _is_usual(spec):
                self.parts = layer_parts(mixer, self._mlp_norm, self._moe, dense)
                self.whole = WholeLayer.of(self.parts, self._moe, compute)
        self._workspace, self._kv_cache = compute.workspace, decoder.kv_cache

    def forward(
        self, x: Tensor, batch: Batch, rotations: Rotations, short: ShortPass | None
    ) -> None:
        if short is None or self.whole is None or not self.whole.takes(short):
            self._attend(x, batch, rotations)
            self._run_mlp(x, batch)
            return
        if not self.whole.attends(short):
            self._attend(x, batch, rotations)
        self.whole.forward(short, batch)

    def forward_chunks(self, x: Tensor, chunks: Sequence[Chunk]) -> None:
        own = _of_each_length(chunks) if x.is_meta else chunks
        for rows, batch, rotations in own:
            first = batch.segments[0]
            self._kv_cache.begin_chunk(first.kv, first.first_position)
            self._attend(x[rows], batch, rotations)
        if self._moe is not None and self._mlp_norm is not None:
            self._run_experts(self._moe, self._mlp_norm, x, chunks)
        else:
            for rows, batch, _ in own:
                self._run_mlp(x[rows], batch)

    def register_experts(self, x: Tensor, config: ModelConfig, step: Step) -> None:
        if self._moe is not None:
            self._moe.register_experts(x, config.moe.num_experts_per_token, step)

    def _attend(self, x: Tensor, batch: Batch, rotations: Rotations) -> None:
        if self._attention is not None and self._attention_norm is not None:
            before = self._workspace.state
            self._attention.forward(x, self._attention_norm, batch, rotations)
            self._workspace.state = before

    def _run_mlp(self, x: Tensor, batch: Batch) -> None:
        if self._mlp_norm is None:
            return
        if self._moe is None and self._dense is not None:
            add = partial(self._add_mlp, self._dense, self._mlp_norm)
            in_chunks("mlp", self._workspace, add, x)
        elif self._moe is not None:
            before = self._workspace.state
            update = self._mlp_norm.of(x)  # what it is made of, to begin with
            beside = None
            if self._dense is not None:
                beside = self._workspace.take("dense", tuple(x.shape), x.dtype)
                in_chunks("mlp", self._workspace, self._dense.forward, update, beside)
            self._moe.forward(update, batch, update)
            self._add(update if beside is None else update.add_(beside), x)
            self._workspace.state = before

    def _run_experts(self, moe: MoELayer, norm: Norm, x: Tensor, chunks: Sequence[Chunk]) -> None:
        """Add the experts of several chunks, and the dense MLP beside them if there is one."""
        with self._workspace.scope():
            update = self._workspace.take("normed", tuple(x.shape), x.dtype)
            for chunk in chunks:
                norm.write(x[chunk.rows], update[chunk.rows])
            beside = None
            if self._dense is not None:
                beside = self._workspace.take("dense", tuple(x.shape), x.dtype)
                for chunk in chunks:
                    self._dense.forward(update[chunk.rows], beside[chunk.rows])
            moe.forward_chunks(update, [(rows, batch) for rows, batch, _ in chunks], update)
            self._add(update if beside is None else update.add_(beside), x)

    def _add_mlp(self, mlp: MLP, norm: Norm, x: Tensor) -> None:
        with self._workspace.scope():
            update = norm.of(x)
            mlp.forward(update, update)
            self._add(update, x)

    def _add(self, update: Tensor, x: Tensor) -> None:
        if self._factor != 1:
            update.mul_(self._factor)
        x.add_(update)
