"""DeepSeek-V2 and V2-Lite: multi-head latent attention and group-limited softmax routing.

The cache holds a latent and one rotating key per token, shared by all heads: for V2-Lite 512 + 64
numbers instead of 16 heads of 192 + 128. The matrices that would expand a latent into a head's key
and value are applied to the head's query and output instead (arXiv 2405.04434, section 2.1.2), so
that attention runs directly over the cache, as if it had one key head:

  q k = (q_fixed  W_key latent) + q_rotated key_rotated = [q_fixed W_key | q_rotated] cached
  out = W_value (sum of weight * latent)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import LatentAttentionSpec, ModelConfig
from lowtide.kernels.layer_parts import LatentParts, NormParts
from lowtide.kernels.operands import Rotation
from lowtide.layers.attention import CachedAttention
from lowtide.layers.batch import Batch
from lowtide.layers.linear import Linear
from lowtide.layers.norm import Norm
from lowtide.layers.rotary import Rotations
from lowtide.layers.router import Router, SoftmaxRouter
from lowtide.layers.rows import in_tiles
from lowtide.layers.sdpa import Scores
from lowtide.memory.kv_cache import KVCache
from lowtide.models.decoder import Decoder

LATENT_EPS = 1e-6
"""Epsilon of the norms on latents: the published code ignores `rms_norm_eps` for them."""


class DeepseekV2(Decoder):
    """Tensor names and routing of DeepSeek-V2."""

    rotation_dtype = torch.float32

    @staticmethod
    def is_float32(name: str) -> bool:
        return name.endswith(".mlp.gate.weight")

    def attention(self, layer: int) -> LatentAttention:
        prefix = f"model.layers.{layer}.self_attn."
        if self.config.mixer(LatentAttentionSpec, layer).q_lora_rank:
            queries = _Queries(
                self.compute,
                self.linear(prefix + "q_b_proj"),
                self.linear(prefix + "q_a_proj"),
                self.tensor(prefix + "q_a_layernorm.weight"),
            )
        else:
            queries = _Queries(self.compute, self.linear(prefix + "q_proj"))
        return LatentAttention(
            layer,
            self.config,
            queries,
            self.linear(prefix + "kv_a_proj_with_mqa"),
            self.tensor(prefix + "kv_a_layernorm.weight"),
            self.tensor(prefix + "kv_b_proj.weight"),
            self.linear(prefix + "o_proj"),
            self.kv_cache,
            self.compute,
        )

    def router(self, layer: int) -> Router:
        experts = self.config.moe
        return SoftmaxRouter(
            self.compute,
            weight=self.tensor(f"model.layers.{layer}.mlp.gate.weight"),
            num_experts_per_token=experts.num_experts_per_token,
            normalise=False,
            num_groups=experts.num_groups,
            num_groups_per_token=experts.num_groups_per_token,
            scaling_factor=experts.scaling_factor,
        )


@dataclass(frozen=True, slots=True)
class _Queries:
    """Query projection; in V2 through a normalised latent."""

    compute: Compute
    up: Linear
    down: Linear | None = None
    norm: Tensor | None = None

    def forward(self, x: Tensor, out: Tensor) -> None:
        """Project x [rows, hidden] to out [rows, query_size]."""
        if self.down is None or self.norm is None:
            self.up.forward(x, out)
            return
        kernels, workspace = self.compute.kernels, self.compute.workspace
        with workspace.scope():
            latent = workspace.take("query latent", (x.shape[0], self.norm.shape[0]), x.dtype)
            self.down.forward(x, latent)
            kernels.rms_norm(latent, self.norm, LATENT_EPS, workspace, latent)
            self.up.forward(latent, out)


class LatentAttention:
    """Attention over latents. A head's queries are [fixed | rotating]."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        queries: _Queries,
        latent: Linear,
        latent_norm: Tensor,
        expansion: Tensor,
        output: Linear,
        kv_cache: KVCache,
        compute: Compute,
    ) -> None:
        """expansion: [heads * (fixed + value_head_dim), rank], a head's keys, then its values."""
        self._spec = spec = config.mixer(LatentAttentionSpec, layer)
        self._queries = queries
        self._latent = latent
        self._latent_norm = latent_norm
        self._expansion = expansion
        self._fixed_dim = spec.head_dim - spec.rope.rotary_dim
        kernels = compute.kernels
        self._rotate = kernels.rotate_pairs if spec.rope.is_interleaved else kernels.rotate
        by_head = expansion.view(spec.num_heads, -1, spec.kv_lora_rank)
        self._to_key = by_head[:, : self._fixed_dim]  # [heads, fixed, rank]
        self._to_value = by_head[:, self._fixed_dim :].transpose(1, 2)  # [heads, rank, value]
        self._output = output
        self._compute = compute
        self._attention = CachedAttention(layer, kv_cache, compute, Scores(spec.softmax_scale))

    def parts(self, norm: Norm) -> LatentParts | None:
        """Return parts for kernels that run whole layers; None without a cache.

        None, too, where halves rotate: kernels rotate neighbours, as all published models do.
        """
        layer, kv_cache, _, scores = self._attention
        arrays = kv_cache.arrays(layer)
        if arrays is None or scores.scale is None or not self._spec.rope.is_interleaved:
            return None
        down, query_norm = self._queries.down, self._queries.norm
        return LatentParts(
            norm.parts(),
            None if down is None else down.product,
            None if query_norm is None else NormParts(query_norm, LATENT_EPS),
            self._queries.up.product,
            self._latent.product,
            NormParts(self._latent_norm, LATENT_EPS),
            self._expansion,
            self._output.product,
            arrays[0],
            self._spec.num_heads,
            self._fixed_dim,
            scores.scale,
        )

    def forward(self, hidden: Tensor, norm: Norm, batch: Batch, rotations: Rotations) -> None:
        """Compute `hidden += attention(norm(hidden))`; hidden [rows, hidden], compute dtype."""
        x, rotation = norm.of(hidden), rotations.whole(self._spec.rope)
        spec, num_rows = self._spec, x.shape[0]
        kernels, workspace = self._compute.kernels, self._compute.workspace
        rank, width = spec.kv_lora_rank, spec.kv_lora_rank + spec.rope.rotary_dim
        cached = workspace.take("latent", (num_rows, 1, width), x.dtype)
        self._latent.forward(x, cached.view(num_rows, width))
        latent, rotating_key = cached[..., :rank], cached[..., rank:]
        in_tiles(lambda x: kernels.rms_norm(x, self._latent_norm, LATENT_EPS, workspace, x), latent)
        in_tiles(
            lambda x, *angles: self._rotate(x, Rotation(*angles), workspace),
            rotating_key,
            *rotation,
        )
        query = workspace.take("latent query", (num_rows, spec.num_heads, width), x.dtype)
        in_tiles(self._query, x, *rotation, query)
        workspace.give_back(x)
        attended = workspace.take("attended", (num_rows, spec.num_heads, width), x.dtype)
        attend = partial(self._attention.run, query, cached, cached, attended)
        self._compute.between_graphs(attend, batch.segments)
        workspace.give_back(query, cached)
        hidden.add_(self._output_of(attended, tuple(x.shape)))

    def _output_of(self, attended: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Compute the layer's output of the given shape; releases `attended`."""
        spec, workspace = self._spec, self._compute.workspace
        values = (shape[0], spec.num_heads, spec.value_head_dim)
        value = workspace.take("value", values, attended.dtype)
        # Attention also sums the rotating keys, which are not values; they are dropped here.
        latents = attended[..., : spec.kv_lora_rank]
        in_tiles(partial(self._multiply_heads, self._to_value), latents, value)
        workspace.give_back(attended)
        update = workspace.take("update", shape, attended.dtype)
        self._output.forward(value.view(shape[0], -1), update)
        return update

    def _query(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """Compute queries for cached latents: out [rows, heads, rank + rotary_dim]."""
        spec, num_rows, rank = self._spec, x.shape[0], self._spec.kv_lora_rank
        workspace = self._compute.workspace
        with workspace.scope():
            shape = (num_rows, spec.num_heads, spec.head_dim)
            query = workspace.take("query", shape, x.dtype)
            self._queries.forward(x, query.view(num_rows, -1))
            rotating = query[..., self._fixed_dim :]
            self._rotate(rotating, Rotation(cos, sin), workspace)
            out[..., rank:].copy_(rotating)
            self._multiply_heads(self._to_key, query[..., : self._fixed_dim], out[..., :rank])

    def _multiply_heads(self, weight: Tensor, x: Tensor, out: Tensor) -> None:
        """Compute out[:, h] = x[:, h] weight[h]: x [rows, heads, in], weight [heads, in, out]."""
        workspace, num_cores = self._compute.workspace, self._compute.executor.num_cores
        self._compute.kernels.multiply_heads(x, weight, out, workspace, num_cores)
