"""Open a model by name and options, or refuse with the name that the option has here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from lowtide.config import ModelConfig
from lowtide.decode.intake import Intake
from lowtide.decode.kinds import make_kind
from lowtide.decode.request import Request
from lowtide.engine.opening.config import MAX_BLOCK_LENGTH, EngineConfig
from lowtide.engine.opening.facts import ModelFacts
from lowtide.engine.opening.model import OpenModel, open_for_plan, open_model
from lowtide.engine.planning.format_plans import as_stored, opened_with_format
from lowtide.errors import UnsupportedError, UsageError
from lowtide.model_folder.hub_model import HubModel
from lowtide.params import SamplingParams, hint
from lowtide.policies.presets import name_of
from lowtide.policies.recipe import Recipe

FIRST_PROMPT_TOKENS = 4
FIRST_ANSWER_TOKENS = 64
"""Length of the requests by which a model is measured at its first load."""


def opened_model(model: str | Path, options: Mapping[str, object]) -> OpenModel:
    """Open a model's facts under `options` without reading weights, or refuse."""
    asked = engine_config(options)
    opened = opened_with_format(partial(open_model, model), asked)
    _check_block_length(asked.block_length, opened.facts.config)
    return opened


def opened_for_plan(model: str | Path | HubModel, options: Mapping[str, object]) -> OpenModel:
    """Open a model's facts for a plan; weights of a hub model are not fetched."""
    asked = engine_config(options)
    opened = opened_with_format(partial(open_for_plan, model), asked)
    _check_block_length(asked.block_length, opened.facts.config)
    return opened


def opened_for_request(model: str | Path, options: Mapping[str, object]) -> OpenModel:
    """Open a model's facts for checks that do not depend on the weights' format."""
    asked = engine_config(options)
    opened = open_model(model, as_stored(asked))
    _check_block_length(asked.block_length, opened.facts.config)
    return opened


def _check_block_length(block_length: int | None, config: ModelConfig) -> None:
    """Raise UnsupportedError for blocks that this kind of model does not have."""
    if block_length not in (None, 1) and config.decoding.writes_in_order:
        raise UnsupportedError(
            f"`block_length` {block_length}: {config.architecture} is autoregressive, its "
            "logits are causal; leave `block_length` out."
        )
    if block_length is not None and not config.decoding.keeps_keys:
        raise UnsupportedError(
            f"`block_length` {block_length}: {config.architecture} is bidirectional, its logits "
            "are of whole sequences; leave `block_length` out."
        )


def intake_of(facts: ModelFacts, context: int, seed: int | None) -> Intake:
    """Make the intake that turns prompts for this model into requests."""
    return Intake(
        config=facts.config,
        tokenizer=facts.tokenizer,
        kind=make_kind(facts.config.decoding),
        context=context,
        max_block_length=MAX_BLOCK_LENGTH,
        seed=seed or 0,
    )


def first_requests(intake: Intake, config: ModelConfig, count: int) -> list[Request]:
    """Return `count` requests for measuring a model as it is loaded; none if there is no room."""
    mask = config.decoding.mask_token_id
    ids = [each for each in range(3, min(config.vocab_size, 4096)) if each != mask]
    drawn = Random(0)
    prompts = [drawn.choices(ids, k=FIRST_PROMPT_TOKENS) for _ in range(count)]
    asked = SamplingParams(temperature=0.0, ignore_eos=True)
    room = intake.max_new_tokens(FIRST_PROMPT_TOKENS, asked) // count
    if room < 1:
        return []
    # A canvas is computed whole: as long a one as answers have.
    most = FIRST_ANSWER_TOKENS if config.decoding.keeps_keys else asked.most_tokens
    num_new = min(room, most)
    return intake.requests(prompts, replace(asked, max_tokens=num_new))


def engine_config(options: Mapping[str, object]) -> EngineConfig:
    """Make an `EngineConfig`; raises UsageError for an unknown option."""
    known = list(EngineConfig.__dataclass_fields__)
    for name in options:
        if name not in known:
            way_out = hint(name, known, _ELSEWHERE)
            raise UsageError(f"{name!r} is not an option of a model. {way_out}")
    if isinstance(policy := options.get("policy"), Recipe):
        options = {**options, "policy": name_of(policy)}
    return EngineConfig(**options)  # type: ignore[arg-type]


_ELSEWHERE = {
    "device_map": "device, with gpu_memory and host_memory as budgets",
    "gpu_memory_utilization": 'gpu_memory, such as "80%",',
    "load_in_4bit": 'format="q4"',
    "max_model_len": "context",
    "n_ctx": "context",
    "n_gpu_layers": 'gpu_memory, such as "10GiB",',
    "quantization": "format",
    "revision": 'a part of the model\'s id, "org/name@revision",',
    "torch_dtype": "dtype",
    "trust_remote_code": "nothing, for no code of a model's repository is ever run,",
}
"""Other libraries' names of options -> their names here."""
