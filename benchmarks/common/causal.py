"""Autoregressive answers from lowtide and its peers on the same Qwen3-MoE weights, timed alike.

A lane answers one prompt greedily: a prefill up to the first token, then a token per pass. Peers
are optional; a lane that cannot be opened raises ImportError.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import numpy as np
import torch

from common.memory import drop_pages, peak_resident_bytes, reset_peak, storage_read_bytes
from common.run import loaded_engine
from lowtide.decode.autoregressive import Autoregressive
from lowtide.decode.request import Committed, Request
from lowtide.engine.config import MAX_PASS_ROWS, EngineConfig
from lowtide.engine.engine import Engine
from lowtide.families import read_config_in
from lowtide.params import SamplingParams
from lowtide.plan import OWN_FORMAT


class Answer(NamedTuple):
    """One prompt's answer and what it took; the first token belongs to the prefill."""

    token_ids: list[int]
    prefill_s: float
    decode_s: float


class Lane(Protocol):
    """Something that answers prompts. `facts` describe it, for the record."""

    facts: Mapping[str, Any]

    def answer(self, prompt: Sequence[int], num_new: int) -> Answer: ...


class Lowtide:
    """A loaded engine, driven as `LLM` does it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        plan = engine.plan
        self.facts = {
            "policy": plan.policy,
            "budget_bytes": plan.budget_bytes,
            "resident_share": sum(plan.residents_per_layer) / plan.num_experts,
            "num_slots": plan.host.num_slots,
        }

    def answer(self, prompt: Sequence[int], num_new: int) -> Answer:
        engine = self._engine
        decoder = Autoregressive(engine.model, engine.kv_cache, MAX_PASS_ROWS)
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
            "offloaded_share": _offloaded_share(model),
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

    def __init__(self, model: Any, facts: Mapping[str, Any], dropped: Sequence[Path] = ()) -> None:
        """The page cache of `dropped` is dropped before every answer, as far as it can be."""
        self._model = model
        self._dropped = dropped
        self.facts = facts

    def answer(self, prompt: Sequence[int], num_new: int) -> Answer:
        model = self._model
        model.reset()
        drop_pages(self._dropped)
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
def open_transformers(model: Path, budget_bytes: int | None) -> Iterator[Lane]:
    """With a budget, what accelerate does not fit into it is on disk."""
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
        yield Transformers(loaded, [] if budget_bytes is None else [model, Path(folder)])


@contextmanager
def open_llama_cpp(gguf: Path, context: int, maps: bool, repacks: bool = True) -> Iterator[Lane]:
    """As many threads as torch has; mapped weights' pages are dropped before every answer.

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
            "num_threads": num_threads,
            "uses_mmap": maps,
            "repacks": repacks,
        }
        yield LlamaCpp(model, facts, [gguf.parent] if maps else [])
    finally:
        model.close()


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """One lane under a budget: a warm-up, then `repeats` answers, medians.

    settings: lane ("lowtide", "transformers" or "llama.cpp"), model, num_prompt, num_new, repeats,
    context, budget_bytes (lowtide: None keeps everything in memory); lowtide's policy, weights (if
    others than the model's) and activations; llama.cpp's gguf, whether it maps and repacks that.
    """
    model, budget_bytes = Path(settings["model"]), settings["budget_bytes"]
    drop_pages([model])
    openers: Mapping[str, Callable[[], Any]] = {
        "lowtide": lambda: open_lowtide(
            Path(settings.get("weights", model)),
            settings["context"],
            budget_bytes,
            settings["policy"],
            activations=settings.get("activations", OWN_FORMAT),
        ),
        "transformers": lambda: open_transformers(model, budget_bytes),
        "llama.cpp": lambda: open_llama_cpp(
            Path(settings["gguf"]),
            settings["context"],
            settings["maps"],
            settings.get("repacks", True),
        ),
    }
    prompt = make_prompt(model, settings["num_prompt"])
    with openers[settings["lane"]]() as lane:
        load_peak_bytes = peak_resident_bytes()
        reset_peak()
        lane.answer(prompt[:64], 2)
        start_bytes = storage_read_bytes()
        answers = [lane.answer(prompt, settings["num_new"]) for _ in range(settings["repeats"])]
        read_bytes = (storage_read_bytes() - start_bytes) // settings["repeats"]
        return {
            **speeds(prompt, answers),
            **lane.facts,
            "storage_read_bytes_per_answer": read_bytes,
            "load_peak_resident_bytes": load_peak_bytes,
            "peak_resident_bytes": peak_resident_bytes(),
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


def speeds(prompt: Sequence[int], answers: Sequence[Answer]) -> dict[str, Any]:
    """Medians, and every single measurement beside them."""
    prefill = [len(prompt) / answer.prefill_s for answer in answers]
    decode = [(len(answer.token_ids) - 1) / answer.decode_s for answer in answers]
    return {
        "prefill_tokens_per_s": statistics.median(prefill),
        "decode_tokens_per_s": statistics.median(decode),
        "each_prefill": [round(rate, 2) for rate in prefill],
        "each_decode": [round(rate, 2) for rate in decode],
    }


def make_prompt(model: Path, num_tokens: int) -> list[int]:
    """Random ids, special ones left out."""
    config = read_config_in(model)
    ordinary = min((config.vocab_size, *config.eos_token_ids))
    ids: list[int] = np.random.default_rng(0).integers(0, ordinary, num_tokens).tolist()
    return ids


def _timed(next_token: Callable[[], int], num_new: int) -> Answer:
    start_s = time.perf_counter()
    token_ids = [next_token()]
    first_s = time.perf_counter()
    token_ids += [next_token() for _ in range(num_new - 1)]
    return Answer(token_ids, first_s - start_s, time.perf_counter() - first_s)


def _offloaded_share(model: Any) -> float:
    sizes = [(tensor.nbytes, tensor.device.type == "meta") for tensor in model.parameters()]
    return sum(size for size, is_away in sizes if is_away) / sum(size for size, _ in sizes)
