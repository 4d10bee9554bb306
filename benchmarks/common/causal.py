"""Autoregressive answers from lowtide and its peers on the same Qwen3-MoE weights, timed alike.

A lane answers a prompt greedily: a prefill up to the first token, then a token per pass. Peers
are optional; a lane that cannot be opened raises ImportError.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import numpy as np
import torch

from common.memory import (
    RoomWatch,
    cached_share,
    drop_pages,
    peak_resident_bytes,
    reset_peak,
    room_bytes,
    storage_read_bytes,
)
from common.run import loaded_engine
from lowtide.core import hit_rate
from lowtide.decode.request import Committed, Request
from lowtide.engine.opening.config import MAX_PASS_ROWS, EngineConfig
from lowtide.engine.running.decoding import make_decoder
from lowtide.engine.running.engine import Engine
from lowtide.errors import UsageError
from lowtide.families import read_config_in
from lowtide.model_folder.gguf_header import GgufHeader
from lowtide.params import SamplingParams
from lowtide.plan import OWN_FORMAT


class Answer(NamedTuple):
    """One prompt's answer and what it took; the first token belongs to the prefill."""

    token_ids: list[int]
    prefill_s: float
    decode_s: float


class Lane(Protocol):
    """Something that answers prompts."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the lane's description and its memory now, for the record."""
        ...

    def answer(self, prompt: Sequence[int], num_new: int) -> Answer: ...


class Lowtide:
    """A loaded engine, driven as `LLM` does it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def facts(self) -> Mapping[str, Any]:
        plan, stats = self._engine.plan, self._engine.experts.stats
        return {
            "policy": plan.policy,
            "budget_bytes": plan.budget_bytes,
            "resident_share": sum(plan.residents_per_layer) / plan.num_experts,
            "num_slots": plan.host.num_slots,
            "hit_rate": hit_rate(stats.num_hits, stats.num_hits + stats.num_misses),
        }

    def answer(self, prompt: Sequence[int], num_new: int) -> Answer:
        engine = self._engine
        decoder = make_decoder(engine)
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        with engine.executor.in_charge():
            decoder.add(Request(id=0, prompt=prompt, params=params))

            def next_token() -> int:
                committed: list[int] = []
                while not committed:
                    for event in decoder.step():
                        if isinstance(event, Committed):
                            committed += event.tokens
                return committed[0]

            return _timed(next_token, num_new)


class Transformers:
    """`Qwen3MoeForCausalLM` with its own cache, in a loop without `generate`'s overhead."""

    def __init__(self, model: Any, dropped: Sequence[Path] = ()) -> None:
        """The page cache of `dropped` is dropped before every pass, out of the time."""
        self._model = model
        self._dropped = dropped
        self.facts = {
            "experts_implementation": model.config._experts_implementation,
            "attention_implementation": model.config._attn_implementation,
            "page_cache": "dropped before every pass" if dropped else "kept",
            "offloaded_share": offloaded_share(model),
            "resident_share": 1 - offloaded_share(model, ".experts."),
        }

    def answer(self, prompt: Sequence[int], num_new: int) -> Answer:
        cache: Any = None
        fed = list(prompt)
        drop_s = [0.0, 0.0]

        def next_token() -> int:
            nonlocal cache, fed
            start_s = time.perf_counter()
            drop_pages(self._dropped)
            drop_s[cache is not None] += time.perf_counter() - start_s
            output = self._model(
                input_ids=torch.tensor([fed]),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            fed = [int(output.logits[0, -1].argmax())]
            return fed[0]

        with torch.inference_mode():
            token_ids, prefill_s, decode_s = _timed(next_token, num_new)
        return Answer(token_ids, prefill_s - drop_s[0], decode_s - drop_s[1])


class LlamaCpp:
    """llama.cpp over a GGUF of the same bytes, by its Python binding."""

    def __init__(self, model: Any, facts: Mapping[str, Any], mapped: Path | None) -> None:
        """mapped: the file that its weights are pages of."""
        self._model = model
        self._facts = facts
        self._mapped = mapped

    @property
    def facts(self) -> Mapping[str, Any]:
        share = 1.0 if self._mapped is None else _cached_experts(self._mapped)
        return {**self._facts, "resident_share": share}

    def answer(self, prompt: Sequence[int], num_new: int) -> Answer:
        model = self._model
        model.reset()
        fed = list(prompt)

        def next_token() -> int:
            nonlocal fed
            model.eval(fed)
            logits = np.ctypeslib.as_array(model._ctx.get_logits(), (model.n_vocab(),))
            fed = [int(logits.argmax())]
            return fed[0]

        return _timed(next_token, num_new)


@contextmanager
def open_lowtide(
    model: Path,
    context: int,
    budget_bytes: int | None,
    policy: str,
    **others: str,
) -> Iterator[Lane]:
    """`budget_bytes`: None keeps all experts in memory. others: of `EngineConfig`."""
    options = EngineConfig(
        host_memory="auto" if budget_bytes is None else budget_bytes,
        context=context,
        policy=policy,
        **others,  # type: ignore[arg-type]
    )
    with loaded_engine(str(model), options) as engine:
        yield Lowtide(engine)


@contextmanager
def open_transformers(
    model: Path, budget_bytes: int | None, drops_pages: bool = False
) -> Iterator[Lane]:
    """Open a model in transformers, with a memory budget or all of it in memory.

    With a budget, accelerate keeps on disk the parameters that do not fit into it. drops_pages: the
    files leave the page cache, which would hold them in memory outside the budget.
    """
    from transformers import Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        options: dict[str, Any] = {}
        if budget_bytes is not None:
            options = {
                "device_map": "auto",
                "max_memory": {"cpu": budget_bytes},
                "offload_folder": folder,
            }
        loaded = Qwen3MoeForCausalLM.from_pretrained(model, dtype="auto", **options).eval()
        yield Transformers(loaded, [model, Path(folder)] if drops_pages else [])


@contextmanager
def open_llama_cpp(gguf: Path, context: int, maps: bool, repacks: bool = True) -> Iterator[Lane]:
    """Open llama.cpp with as many threads as torch has.

    repacks: whether it may copy weights into a layout of its own, as it does unasked, mapped or
    not: under a limit below their size it cannot.
    """
    import llama_cpp

    num_threads = torch.get_num_threads()
    defaults = llama_cpp.llama_model_default_params()
    defaults.use_extra_bufts = repacks
    with patch.object(llama_cpp.llama_cpp, "llama_model_default_params", lambda: defaults):
        model = llama_cpp.Llama(
            str(gguf),
            n_ctx=context,
            n_batch=MAX_PASS_ROWS,
            n_ubatch=MAX_PASS_ROWS,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            use_mmap=maps,
            verbose=False,
        )
    try:
        facts = {
            "version": llama_cpp.__version__,
            "build_flags": _build_flags(),
            "system_info": llama_cpp.llama_print_system_info().decode().strip(),
            "num_threads": num_threads,
            "num_batch_rows": MAX_PASS_ROWS,
            "flash_attention": _flash_attention(model),
            "uses_mmap": maps,
            "repacks": repacks,
        }
        yield LlamaCpp(model, facts, gguf if maps else None)
    finally:
        model.close()


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """One lane from a cold start under a budget: `repeats` answers, each to a prompt of its own.

    Pages of what it reads are dropped once, before it loads; what it then has in memory stays, its
    own or the page cache's. So the first answer stands alone, beside the later ones.

    settings: lane ("lowtide", "transformers" or "llama.cpp"), model, num_prompt, num_new, repeats,
    context, budget_bytes (lowtide: None keeps everything in memory); lowtide's policy, weights (if
    others than the model's) and activations; llama.cpp's gguf, whether it maps and repacks that;
    of transformers whether it is without a page cache. Raises UsageError for one answer alone.
    """
    repeats, num_prompt = settings["repeats"], settings["num_prompt"]
    if repeats < 2:
        raise UsageError(f"{repeats} answers are no first one and later ones; take 2 or more.")
    model = Path(settings["model"])
    files = (settings[name] for name in ("model", "weights", "gguf") if settings.get(name))
    drop_pages(map(Path, files))
    start_room_bytes, start_s = room_bytes(), time.perf_counter()
    with _opened(settings) as lane:
        load_s, load_peak_bytes = time.perf_counter() - start_s, peak_resident_bytes()
        reset_peak()
        start_bytes, answers = storage_read_bytes(), []
        with RoomWatch() as room:
            for seed in range(repeats):
                prompt = make_prompt(model, num_prompt, seed)
                answers.append(lane.answer(prompt, settings["num_new"]))
        return {
            **speeds(num_prompt, answers[1:]),
            **first_speeds(num_prompt, answers[0]),
            **lane.facts,
            "load_s": load_s,
            "storage_read_bytes_per_answer": (storage_read_bytes() - start_bytes) // repeats,
            "load_peak_resident_bytes": load_peak_bytes,
            "peak_resident_bytes": peak_resident_bytes(),
            "room_at_start_bytes": start_room_bytes,
            "room_least_bytes": room.least_bytes,
            "room_most_bytes": room.most_bytes,
        }


def with_ratios(rows: Mapping[str, dict[str, Any]], ours: str) -> Iterator[dict[str, Any]]:
    """A row for each lane; those of others with our speeds over theirs."""
    for name, row in rows.items():
        ratios = {
            f"{phase}_ratio": rows[ours][f"{phase}_tokens_per_s"] / row[f"{phase}_tokens_per_s"]
            for phase in ("prefill", "decode")
            if ours in rows and name != ours
        }
        yield {"lane": name, **row, **ratios}


def speeds(num_prompt: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """Medians, and every single measurement beside them."""
    prefill, decode = _rates(num_prompt, answers)
    return {
        "prefill_tokens_per_s": statistics.median(prefill),
        "decode_tokens_per_s": statistics.median(decode),
        "each_prefill": prefill,
        "each_decode": decode,
    }


def first_speeds(num_prompt: int, answer: Answer) -> dict[str, float]:
    """Return the speeds of an answer without a warm-up."""
    [prefill], [decode] = _rates(num_prompt, [answer])
    return {"first_prefill_tokens_per_s": prefill, "first_decode_tokens_per_s": decode}


def make_prompt(model: Path, num_tokens: int, seed: int) -> list[int]:
    """Random ids, special ones left out."""
    if model.is_file():  # without words, so none is special
        ordinary = GgufHeader.read(model).tensors["token_embd.weight"].shape[0]
    else:
        config = read_config_in(model)
        ordinary = min((config.vocab_size, *config.eos_token_ids))
    ids: list[int] = np.random.default_rng(seed).integers(0, ordinary, num_tokens).tolist()
    return ids


def offloaded_share(model: Any, part: str = "") -> float:
    """Return the share of a transformers model's bytes that accelerate holds outside memory.

    Counts the parameters with `part` in their names; 0 where there are none.
    """
    sizes = [
        (tensor.nbytes, tensor.device.type == "meta")
        for name, tensor in model.named_parameters()
        if part in name
    ]
    return sum(size for size, is_away in sizes if is_away) / max(1, sum(size for size, _ in sizes))


def _opened(settings: Mapping[str, Any]) -> AbstractContextManager[Lane]:
    """The lane of `measure`."""
    model, context = Path(settings["model"]), settings["context"]
    if settings["lane"] == "lowtide":
        return open_lowtide(
            Path(settings.get("weights", model)),
            context,
            settings["budget_bytes"],
            settings["policy"],
            activations=settings.get("activations", OWN_FORMAT),
        )
    if settings["lane"] == "transformers":
        drops_pages = settings.get("drops_pages", False)
        return open_transformers(model, settings["budget_bytes"], drops_pages)
    if settings["lane"] == "llama.cpp":
        repacks = settings.get("repacks", True)
        return open_llama_cpp(Path(settings["gguf"]), context, settings["maps"], repacks)
    raise UsageError(f"There is no lane {settings['lane']!r}.")


def _rates(num_prompt: int, answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """Tokens per second of the prompt and of the tokens behind the first, answer by answer."""
    prefill = [num_prompt / answer.prefill_s for answer in answers]
    decode = [(len(answer.token_ids) - 1) / answer.decode_s for answer in answers]
    return [round(rate, 2) for rate in prefill], [round(rate, 2) for rate in decode]


def _build_flags() -> str:
    """Return the flags of llama.cpp's build, which `make peers` leaves in its environment."""
    file = Path(sys.prefix) / "llama-cpp-flags"
    return file.read_text().strip() if file.exists() else "not built by `make peers`"


def _flash_attention(model: Any) -> str:
    """llama.cpp's word for whether a context uses it."""
    import llama_cpp

    name = llama_cpp.llama_flash_attn_type_name(model.context_params.flash_attn_type)
    return str((name or b"unknown").decode())


def _cached_experts(gguf: Path) -> float:
    """The share of a file's experts that the page cache holds."""
    tensors = GgufHeader.read(gguf).tensors
    experts = [tensor for name, tensor in tensors.items() if "_exps." in name]
    return cached_share(gguf, [(each.offset, each.offset + each.num_bytes) for each in experts])


def _timed(next_token: Callable[[], int], num_new: int) -> Answer:
    start_s = time.perf_counter()
    token_ids = [next_token()]
    first_s = time.perf_counter()
    token_ids += [next_token() for _ in range(num_new - 1)]
    return Answer(token_ids, first_s - start_s, time.perf_counter() - first_s)
