"""Train the demo models of the package on short tasks with one right answer, on one CPU core.

One Ling/LLaDA2 body (3.8M parameters, 32 experts) is trained twice over: as a causal language
model (`autoregressive`), then, from those weights, as a block diffusion model (`diffusion`). Both
are written as Hugging Face checkpoint folders that any loader of the real families reads; the
tasks are those of `lowtide.model_folder.demo_tasks`.

    python tools/train_demo.py autoregressive --minutes 25 --out src/lowtide/demo/autoregressive
    python tools/train_demo.py diffusion --minutes 45 --out src/lowtide/demo/diffusion \
        --start src/lowtide/demo/autoregressive

`make deep-demo` trains a causal one of 12 layers, which is not in the package.

The model is written a second time here, for training, so the checkpoints also test the engine's
own reading of them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from lowtide.model_folder.demo_tasks import as_turn, draw

SPECIAL_TOKENS = ["<|endoftext|>", "<|mask|>", "<|role_end|>"]
SPECIAL_TOKENS += ["<|user|>", "<|assistant|>", "<|system|>"]
ENDOFTEXT, MASK, ROLE_END, USER, ASSISTANT = range(5)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}<|role_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }}<|role_end|>{% endif %}"
    "{% for message in messages %}"
    "<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|role_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Shows tools and calls to a model that was trained on neither: a grammar makes its calls valid."""

MAX_SHARD_BYTES = 4_000_000
BLOCK = 32
DTYPE = torch.bfloat16  # of what is multiplied; weights are fp32 while they are trained
STEP_TOKENS = 4096
SEQUENCE_TOKENS = 256
LEARNING_RATE = 4e-3
WARMUP_STEPS = 50
SAVE_S = 120.0

# How often a turn is of each task; how often the first one is a sudoku, which fills half of all.
SHARES = {"sum": 8, "sort": 4, "roman": 2, "json end": 1, "json value": 4}
SUDOKU_SHARE = {"autoregressive": 0.3, "diffusion": 0.75}


# --- Sequences ----------------------------------------------------------------------------------


def make_tokenizer() -> Tokenizer:
    """Every byte is a token, so that the model sees each digit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


class Conversations:
    """Token ids of questions that are not held out, with their answers."""

    def __init__(self, kind: str, seed: int) -> None:
        self.sudoku_share = SUDOKU_SHARE[kind]
        self.source = random.Random(seed)
        self.tokenizer = make_tokenizer()

    def batches(self) -> Iterator[Tensor]:
        """[STEP_TOKENS / SEQUENCE_TOKENS, SEQUENCE_TOKENS] for each step."""
        while True:
            batch = [self.conversation() for _ in range(STEP_TOKENS // SEQUENCE_TOKENS)]
            yield torch.tensor(batch)

    def conversation(self) -> list[int]:
        """Draw as many turns as fit, and end the text there, as decoding does."""
        is_sudoku = self.source.random() < self.sudoku_share
        ids = self.turn("sudoku") if is_sudoku else []
        while len(ids + (more := self.turn(self.task()))) <= SEQUENCE_TOKENS:
            ids += more
        return ids + [ENDOFTEXT] * (SEQUENCE_TOKENS - len(ids))

    def task(self) -> str:
        [task] = self.source.choices(list(SHARES), list(SHARES.values()))
        return task

    def turn(self, task: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(as_turn(draw(task, self.source, False))).ids
        return ids


def draw_noise(tokens: Tensor) -> Tensor:
    """Draw the masked places [batch, seq]: of each block another share of its answers."""
    shape = (len(tokens), tokens.shape[1] // BLOCK, 1)
    share = torch.rand(shape).masked_fill(torch.rand(shape) < 0.2, 1.0)  # as decoding begins
    # Now and then questions too, so that any such text can be scored.
    is_wanted = answers(tokens) | (tokens == ENDOFTEXT)
    is_wanted = is_wanted.view(*shape[:2], BLOCK) | (torch.rand(shape) < 0.15)
    return ((torch.rand(*shape[:2], BLOCK) < share) & is_wanted).view(tokens.shape)


# --- Model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Args:
    """Names of config.json."""

    vocab_size: int = 272
    hidden_size: int = 128
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    moe_intermediate_size: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    num_shared_experts: int = 1
    n_group: int = 8
    topk_group: int = 4
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight.to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    """[batch, heads, seq, head_dim]: each row sees its block and what is before it."""
    blocks = torch.arange(q.shape[2]) // block
    hidden = torch.zeros(len(blocks), len(blocks), dtype=q.dtype)
    hidden.masked_fill_(blocks[:, None] < blocks, -1e4)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT + hidden  # on a CPU, SDPA trains half as fast
    return scores.softmax(-1) @ v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of x [batch, seq, heads, head_dim]; trailing dims pass."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def rope_tables(args: Args, num_rows: int) -> tuple[Tensor, Tensor]:
    rotary_dim = int(args.head_dim * args.partial_rotary_factor)
    exponents = torch.arange(0, rotary_dim, 2).float() / rotary_dim
    angles = torch.arange(num_rows)[:, None] * args.rope_theta**-exponents  # [seq, rotary_dim / 2]
    return angles.cos().to(DTYPE)[:, None], angles.sin().to(DTYPE)[:, None]


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Matrix(nn.Module):
    """A weight without bias, kept in fp32 and applied in the dtype of its input."""

    def __init__(self, out_dim: int, in_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_dim, in_dim) * in_dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.heads = (args.num_attention_heads, args.num_key_value_heads, args.num_key_value_heads)
        self.head_dim = args.head_dim
        self.query_key_value = Matrix(sum(self.heads) * args.head_dim, args.hidden_size)
        self.dense = Matrix(args.hidden_size, args.num_attention_heads * args.head_dim)
        self.query_layernorm = Norm(args.head_dim, args.rms_norm_eps)
        self.key_layernorm = Norm(args.head_dim, args.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, block: int) -> Tensor:
        batch, seq, _ = x.shape
        fused = self.query_key_value(x).view(batch, seq, sum(self.heads), self.head_dim)
        q, k, v = fused.split(self.heads, dim=2)
        q = rotate(self.query_layernorm(q), cos, sin).transpose(1, 2)
        group = self.heads[0] // self.heads[1]
        k = rotate(self.key_layernorm(k), cos, sin).repeat_interleave(group, dim=2).transpose(1, 2)
        v = v.repeat_interleave(group, dim=2).transpose(1, 2)
        out: Tensor = self.dense(attend(q, k, v, block).transpose(1, 2).reshape(batch, seq, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Matrix(inner, hidden)
        self.up_proj = Matrix(inner, hidden)
        self.down_proj = Matrix(hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Dispatch(torch.autograd.Function):
    """Token rows -> expert slots.  A gather both ways: a slot has one token, a pair one slot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_slot: Tensor, slot_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_pair)
        return x.index_select(0, token_of_slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot_of_pair,) = ctx.saved_tensors
        rows = grad.index_select(0, slot_of_pair.flatten())
        return rows.view(*slot_of_pair.shape, -1).sum(1), None, None


class Combine(torch.autograd.Function):
    """Expert slots -> sum over each token's pairs; the transpose of Dispatch."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token_of_slot: Tensor, slot_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_slot)
        rows = y.index_select(0, slot_of_pair.flatten())
        return rows.view(*slot_of_pair.shape, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # An empty slot receives token 0's gradient; its weight is 0, so nothing comes of it.
        (token_of_slot,) = ctx.saved_tensors
        return grad.index_select(0, token_of_slot), None, None


class Gate(nn.Module):
    """Sigmoid router with grouped top-k; the bias chooses experts and never weighs them."""

    expert_bias: Tensor
    hits: Tensor

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.weight = nn.Parameter(torch.randn(args.num_experts, args.hidden_size) * 0.02)
        self.register_buffer("expert_bias", torch.zeros(args.num_experts))
        self.register_buffer("hits", torch.zeros(args.num_experts), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        args = self.args
        scores = F.linear(x.float(), self.weight).sigmoid()  # [tokens, experts]
        with torch.no_grad():
            ranked = (scores + self.expert_bias).view(len(x), args.n_group, -1)
            groups = ranked.topk(2, dim=-1).values.sum(-1).topk(args.topk_group, dim=-1).indices
            kept = torch.zeros(len(x), args.n_group, dtype=torch.bool).scatter_(1, groups, True)
            ranked = ranked.masked_fill(~kept[..., None], -math.inf).flatten(1)
            chosen = ranked.topk(args.num_experts_per_tok, dim=-1).indices
            self.hits += torch.bincount(chosen.flatten(), minlength=args.num_experts)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * args.routed_scaling_factor
        return chosen, weights  # [tokens, k] twice

    def balance(self, rate: float) -> float:
        """Lower the bias of experts chosen too often since the last call, raise the others'.

        Returns the busiest expert's share over the mean share.
        """
        imbalance = float(self.hits.max() / self.hits.mean())
        self.expert_bias += rate * torch.sign(self.hits.mean() - self.hits)
        self.hits.zero_()
        return imbalance


class SparseMlp(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        hidden, inner, count = args.hidden_size, args.moe_intermediate_size, args.num_experts
        self.gate = Gate(args)
        self.shared_experts = Mlp(hidden, inner * args.num_shared_experts)
        self.gate_proj = nn.Parameter(torch.randn(count, inner, hidden) * hidden**-0.5)
        self.up_proj = nn.Parameter(torch.randn(count, inner, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, inner) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [tokens, hidden]
        chosen, weights = self.gate(tokens)
        out: Tensor = self.experts(tokens, chosen, weights) + self.shared_experts(tokens)
        return out.view_as(x)

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Each expert's tokens laid in its own padded rows, so all experts are three products."""
        count = self.gate_proj.shape[0]
        token_of_slot, slot_of_pair = expert_slots(chosen, count)
        rows = Dispatch.apply(x, token_of_slot, slot_of_pair)  # type: ignore[no-untyped-call]
        rows = rows.view(count, -1, x.shape[-1])
        slot_weights = torch.zeros(len(token_of_slot))
        slot_weights = slot_weights.scatter(0, slot_of_pair.flatten(), weights.flatten())
        gate = torch.bmm(rows, self.gate_proj.to(x.dtype).mT)
        up = torch.bmm(rows, self.up_proj.to(x.dtype).mT)
        # Weighing the narrow inner rows equals weighing the outputs: down_proj is linear.
        inner = F.silu(gate) * up * slot_weights.to(x.dtype).view(count, -1, 1)
        rows = torch.bmm(inner, self.down_proj.to(x.dtype).mT).flatten(0, 1)
        out: Tensor = Combine.apply(rows, token_of_slot, slot_of_pair)  # type: ignore[no-untyped-call]
        return out


def expert_slots(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Place each (token, expert) pair in num_experts x capacity slots; return both directions."""
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=num_experts)
    capacity = math.ceil(int(counts.max()) / 64) * 64  # few distinct shapes: kernels are cached
    order = flat.argsort(stable=True)
    first = counts.cumsum(0) - counts
    experts = flat[order]
    slots = experts * capacity + torch.arange(len(flat)) - first[experts]
    slot_of_pair = torch.empty_like(flat).scatter_(0, order, slots)
    token_of_slot = torch.zeros(num_experts * capacity, dtype=torch.long)
    token_of_slot.scatter_(0, slots, order // chosen.shape[1])
    return token_of_slot, slot_of_pair.view_as(chosen)


class Layer(nn.Module):
    def __init__(self, args: Args, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = Norm(args.hidden_size, args.rms_norm_eps)
        self.attention = Attention(args)
        is_dense = index < args.first_k_dense_replace
        self.mlp = Mlp(args.hidden_size, args.intermediate_size) if is_dense else SparseMlp(args)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, block: int) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), cos, sin, block)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Model(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.word_embeddings = nn.Parameter(torch.randn(args.vocab_size, args.hidden_size) * 0.1)
        self.layers = nn.ModuleList(Layer(args, i) for i in range(args.num_hidden_layers))
        self.norm = Norm(args.hidden_size, args.rms_norm_eps)
        self.lm_head = nn.Parameter(torch.randn(args.vocab_size, args.hidden_size) * 0.02)
        for name, weight in self.named_parameters():
            if name.endswith(("down_proj", "down_proj.weight", "dense.weight")):
                weight.data *= (2 * args.num_hidden_layers) ** -0.5

    def forward(self, tokens: Tensor, block: int) -> Tensor:
        """Last hidden states [batch, seq, hidden], with attention by blocks of so many tokens."""
        cos, sin = rope_tables(self.args, tokens.shape[1])
        x = F.embedding(tokens, self.word_embeddings).to(DTYPE)
        for layer in self.layers:
            x = layer(x, cos, sin, block)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.lm_head).float()


# --- Optimiser ----------------------------------------------------------------------------------


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz towards the nearest semi-orthogonal matrices.  [n, rows <= cols]."""
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) @ x
    return torch.Tensor.float(x)


class Optimizer:
    """Muon for the matrices of the layers, AdamW for the rest; owns their moments, no schedule.

    Muon's steps are scaled to AdamW's usual size, so that one learning rate serves both.
    """

    def __init__(self, model: Model, weight_decay: float = 0.1) -> None:
        self.weights = dict(model.named_parameters())
        self.weight_decay = weight_decay
        self.moments = {n: torch.zeros_like(w.data) for n, w in self.weights.items()}
        self.by_shape: dict[tuple[int, int], list[str]] = {}
        self.adam: list[str] = []
        for name, weight in self.weights.items():
            if "layers" in name and weight.ndim > 1 and "gate.weight" not in name:
                rows, cols = sorted(weight.shape[-2:])
                self.by_shape.setdefault((rows, cols), []).append(name)
            else:
                self.adam.append(name)
        self.squares = {n: torch.zeros_like(self.weights[n].data) for n in self.adam}

    @torch.no_grad()
    def step(self, lr: float, count: int) -> None:
        """Count is the number of this step, from 1."""
        grads = {n: w.grad for n, w in self.weights.items() if w.grad is not None}
        norms = torch.stack([g.norm() for g in grads.values()])
        scale = 1 / norms.norm().clamp(min=1.0)
        for grad in grads.values():
            grad.mul_(scale)
        for weight in self.weights.values():
            if weight.ndim > 1:
                weight.mul_(1 - lr * self.weight_decay)
        for shape, names in self.by_shape.items():
            self.muon_step(shape, names, grads, lr)
        for name in self.adam:
            self.adam_step(name, grads[name], lr, count)
        for weight in self.weights.values():
            weight.grad = None

    def muon_step(
        self, shape: tuple[int, int], names: list[str], grads: dict[str, Tensor], lr: float
    ) -> None:
        directions = []
        for name in names:
            moment = self.moments[name].lerp_(grads[name], 0.05)
            direction = grads[name].lerp(moment, 0.95)  # Nesterov
            is_wide = direction.shape[-1] == shape[1]
            directions.append((direction if is_wide else direction.mT).reshape(-1, *shape))
        updates = orthogonalise(torch.cat(directions)).split([len(d) for d in directions])
        for name, update in zip(names, updates, strict=True):
            weight = self.weights[name]
            update = update if weight.shape[-1] == shape[1] else update.mT
            weight.sub_(update.reshape(weight.shape), alpha=lr * 0.2 * math.sqrt(shape[1]))

    def adam_step(self, name: str, grad: Tensor, lr: float, count: int) -> None:
        moment = self.moments[name].lerp_(grad, 0.1)
        square = self.squares[name].lerp_(grad.square(), 0.05)
        spread = (square / (1 - 0.95**count)).sqrt_().add_(1e-8)
        self.weights[name].addcdiv_(moment, spread, value=-lr / (1 - 0.9**count))


# --- Training -----------------------------------------------------------------------------------


def weighted_loss(logits: Tensor, target: Tensor, is_answer: Tensor) -> tuple[Tensor, float]:
    """The loss of tokens [n], and how many of the answers' are right.

    Questions count little: they are drawn, and what follows an answer is learnt at once.
    """
    weights = torch.where(is_answer, 1.0, 0.1)
    each = F.cross_entropy(logits, target, reduction="none")
    right = (logits.argmax(-1) == target)[is_answer].float().mean()
    return (each * weights).sum() / weights.sum(), float(right)


def answers(tokens: Tensor) -> Tensor:
    """Mark the tokens of answers, their ends included.  [batch, seq] bool."""
    is_answer = (tokens == ASSISTANT).cumsum(1) == (tokens == USER).cumsum(1)
    return is_answer & (tokens != ASSISTANT) & (tokens != ENDOFTEXT)


def causal_loss(model: Model, tokens: Tensor) -> tuple[Tensor, float]:
    """Return the loss of next tokens. tokens [batch, seq]."""
    logits = model.logits(model(tokens[:, :-1], 1)).flatten(0, 1)
    return weighted_loss(logits, tokens[:, 1:].flatten(), answers(tokens)[:, 1:].flatten())


def block_loss(model: Model, tokens: Tensor) -> tuple[Tensor, float]:
    """Return the loss of masked tokens, at their own positions. tokens [batch, seq]."""
    is_masked = draw_noise(tokens)
    hidden = model(torch.where(is_masked, MASK, tokens), BLOCK)[is_masked]
    return weighted_loss(model.logits(hidden), tokens[is_masked], answers(tokens)[is_masked])


def losses(kind: str, model: Model, seed: int) -> Iterator[tuple[Tensor, float]]:
    """One for each step."""
    for tokens in Conversations(kind, seed).batches():
        is_causal = kind == "autoregressive"
        yield causal_loss(model, tokens) if is_causal else block_loss(model, tokens)


def train(kind: str, model: Model, minutes: float, seed: int, out: Path) -> None:
    """Learning rates fall to nothing as the minutes pass. Writes `out` every SAVE_S and at last."""
    optimizer = Optimizer(model)
    start_s = saved_s = time.monotonic()
    mean = 0.0
    for step, (loss, right) in enumerate(losses(kind, model, seed), 1):
        loss.backward()
        elapsed_s = time.monotonic() - start_s
        left = max(0.0, 1 - elapsed_s / (60 * minutes))
        rate = LEARNING_RATE * min(1.0, step / WARMUP_STEPS) * left
        optimizer.step(rate, step)
        gates = [module for module in model.modules() if isinstance(module, Gate)]
        imbalance = sum(gate.balance(2 * rate) for gate in gates) / len(gates)
        mean += (right - mean) / min(step, 50)
        if step % 50 == 0:
            print(
                f"{kind} {elapsed_s / 60:.1f} min, step {step}, loss {loss.item():.4f}, "
                f"{mean:.2%} right, imbalance {imbalance:.2f}, "
                f"{step * STEP_TOKENS / elapsed_s:,.0f} tokens/s, "
                f"{time.process_time() / elapsed_s:.2f} cores",
                flush=True,
            )
        if time.monotonic() - saved_s > SAVE_S or not left:
            saved_s = time.monotonic()
            write_checkpoint(model, kind, out)
        if not left:
            return


# --- Checkpoints --------------------------------------------------------------------------------


def checkpoint_config(args: Args, kind: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        **asdict(args),
        "eos_token_id": ROLE_END,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": args.moe_intermediate_size,
        "norm_head": False,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "pad_token_id": ENDOFTEXT,
        "rope_scaling": None,
        "rotary_dim": int(args.head_dim * args.partial_rotary_factor),
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
    }
    if kind == "autoregressive":
        names = {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2"}
    else:
        names = {"mask_token_id": MASK, "block_length": BLOCK}
    return dict(sorted((config | names).items()))


def published_tensors(model: Model) -> dict[str, Tensor]:
    """The names of the released checkpoints: one tensor per expert, bf16 but for the bias."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer, _, part = name.rpartition(".mlp.")
        if name == "lm_head":
            tensors["lm_head.weight"] = tensor.bfloat16()
        elif name == "word_embeddings":
            tensors["model.word_embeddings.weight"] = tensor.bfloat16()
        elif part in ("gate_proj", "up_proj", "down_proj"):
            for expert, weight in enumerate(tensor.bfloat16()):
                tensors[f"model.{layer}.mlp.experts.{expert}.{part}.weight"] = weight.clone()
        else:
            is_bias = name.endswith("expert_bias")
            tensors[f"model.{name}"] = tensor.clone() if is_bias else tensor.bfloat16()
    return tensors


@torch.no_grad()
def read_checkpoint(model: Model, folder: Path) -> None:
    """Takes over the weights of a folder that write_checkpoint wrote."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    for name, tensor in model.state_dict().items():
        layer, _, part = name.rpartition(".mlp.")
        if name in ("lm_head", "word_embeddings"):
            source = tensors[f"model.{name}.weight".replace("model.lm_head", "lm_head")]
        elif part in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.{layer}.mlp.experts"
            experts = range(len(tensor))
            source = torch.stack([tensors[f"{prefix}.{e}.{part}.weight"] for e in experts])
        else:
            source = tensors[f"model.{name}"]
        tensor.copy_(source)


def split_shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    header_bytes = 150_000
    shards: list[dict[str, Tensor]] = [{}]
    room = MAX_SHARD_BYTES - header_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room:
            shards.append({})
            room = MAX_SHARD_BYTES - header_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_checkpoint(model: Model, kind: str, folder: Path) -> None:
    """A complete folder, moved into place only when all of it is written."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = published_tensors(model)
    shards = split_shards(tensors)
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        shard_name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, partial / shard_name, metadata={"format": "pt"})
        (partial / shard_name).chmod(0o644)  # save_file makes it private
        weight_map |= dict.fromkeys(shard, shard_name)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index_content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_json(partial / "model.safetensors.index.json", index_content)
    write_json(partial / "config.json", checkpoint_config(model.args, kind))
    ids = {"eos_token_id": [ROLE_END, ENDOFTEXT], "pad_token_id": ENDOFTEXT}
    write_json(partial / "generation_config.json", ids | {"do_sample": False})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[ROLE_END],
        "pad_token": SPECIAL_TOKENS[ENDOFTEXT],
        "mask_token": SPECIAL_TOKENS[MASK],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    if kind == "autoregressive":  # diffusion models have no grammars
        named = {"default": CHAT_TEMPLATE, "tool_use": TOOL_TEMPLATE}
        templates = [{"name": name, "template": text} for name, text in named.items()]
        tokenizer_config["chat_template"] = templates
    write_json(partial / "tokenizer_config.json", tokenizer_config)
    make_tokenizer().save(str(partial / "tokenizer.json"))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


# --- Command line -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kind", choices=list(SUDOKU_SHARE))
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--start", type=Path, help="a folder whose weights are trained on")
    parser.add_argument("--layers", type=int, default=Args.num_hidden_layers)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cuda takes minutes for hours of a core")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_device(options.device)
    torch.manual_seed(options.seed)
    model = Model(Args(num_hidden_layers=options.layers))
    if options.start is not None:
        read_checkpoint(model, options.start)
    train(options.kind, model, options.minutes, options.seed, options.out)


if __name__ == "__main__":
    main()
