"""Every option a user can set, declared once, and where its value came from.

One `Option` gives the command line's flag, the environment variable and the key of a TOML file;
a flag wins over the environment, the environment over the file, the file over the default.
Imports no torch, so that a wrong value is refused at once.

    settings = resolve({"host_memory": "2GiB"}, os.environ, Path("lowtide.toml"))
    settings["host_memory"], settings.engine_options(), settings.sampling_params()
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.cli.option import ENV_PREFIX, Group, Kind, Option
from lowtide.errors import UsageError
from lowtide.params import REMASKING_RULES, DiffusionParams, SamplingParams
from lowtide.policies.presets import preset_names

__all__ = ["OPTIONS", "Group", "Kind", "Option", "Settings", "is_common", "resolve"]

MAX_FILE_BYTES = 2**20

OPTIONS: tuple[Option, ...] = (
    Option(
        "host_memory", Kind.SIZE, Group.ENGINE, "Memory budget: 12G, 80%, auto.", "auto", "--memory"
    ),
    Option("gpu_memory", Kind.SIZE, Group.ENGINE, "GPU memory budget: 12G, 80%, auto.", "auto"),
    Option(
        "policy",
        Kind.TEXT,
        Group.ENGINE,
        f"Placement policy, one of {', '.join(preset_names())}.",
        "auto",
    ),
    Option("policy_option", Kind.PAIRS, Group.ENGINE, "A policy's own setting, such as tau=4."),
    Option("device", Kind.TEXT, Group.ENGINE, "auto, cpu, cuda or emulated.", "auto"),
    Option(
        "device_option",
        Kind.PAIRS,
        Group.ENGINE,
        "The emulated device's link_GBps=2 and the like.",
    ),
    Option("context", Kind.INTEGER, Group.ENGINE, "Tokens to make room for, prompt included."),
    Option("dtype", Kind.TEXT, Group.ENGINE, "Compute type; the checkpoint's own if not given."),
    Option(
        "format",
        Kind.TEXT,
        Group.ENGINE,
        "Format of weights in memory: own, or q8, q4, auto (change words).",
    ),
    Option("expert_dtype", Kind.TEXT, Group.ENGINE, "Format that experts are kept in."),
    Option("dense_dtype", Kind.TEXT, Group.ENGINE, "Format that all other matrices are kept in."),
    Option(
        "activations",
        Kind.TEXT,
        Group.ENGINE,
        "Rows' type in products with q8, q4 and GGUF's packed weights: own, int8 (changes words).",
        "own",
    ),
    Option("kernels", Kind.TEXT, Group.ENGINE, "auto or reference.", "auto"),
    Option(
        "kv_cache",
        Kind.CACHE,
        Group.ENGINE,
        "Keep keys and values where that is exact; prefix, dual (LLaDA, Dream): approximately.",
        True,
    ),
    Option(
        "elastic",
        Kind.BOOLEAN,
        Group.ENGINE,
        "Lend the KV cache's unused memory to experts (not on a GPU).",
        False,
    ),
    Option(
        "check_weights", Kind.BOOLEAN, Group.ENGINE, "Refuse weights that are not finite.", False
    ),
    Option("unsafe", Kind.BOOLEAN, Group.ENGINE, "Allow baselines that harm answers.", False),
    Option("calibration", Kind.TEXT, Group.ENGINE, "What lowtide calibrate wrote."),
    Option("config_override", Kind.JSON_PAIRS, Group.ENGINE, "A value to replace config.json's."),
    Option("offline", Kind.BOOLEAN, Group.HUB, "Use only what is on this machine.", False),
    Option("raw", Kind.BOOLEAN, Group.PROMPT, "Take the text as it is: no chat template.", False),
    Option("system", Kind.TEXT, Group.PROMPT, "What the model is told first, by its template."),
    Option("max_tokens", Kind.INTEGER, Group.SAMPLING, "New tokens at most (256, or what fits)."),
    Option("temperature", Kind.NUMBER, Group.SAMPLING, "0 takes the likeliest token, always (0)."),
    Option("top_k", Kind.INTEGER, Group.SAMPLING, "Draw only from the k likeliest tokens."),
    Option("top_p", Kind.NUMBER, Group.SAMPLING, "Draw only from the least set with this mass."),
    Option("min_p", Kind.NUMBER, Group.SAMPLING, "Draw only what is this share as likely as any."),
    Option(
        "repetition_penalty", Kind.NUMBER, Group.SAMPLING, "Above 1 discourages what was said (1)."
    ),
    Option("presence_penalty", Kind.NUMBER, Group.SAMPLING, "Off the logit of tokens used (0)."),
    Option("frequency_penalty", Kind.NUMBER, Group.SAMPLING, "The same for each use (0)."),
    Option("seed", Kind.INTEGER, Group.SAMPLING, "Equal seeds give equal results (0)."),
    Option("stop", Kind.TEXTS, Group.SAMPLING, "Text that ends the answer."),
    Option("ignore_eos", Kind.BOOLEAN, Group.SAMPLING, "Go on after the end-of-text token."),
    Option(
        "logprobs", Kind.INTEGER, Group.SAMPLING, "Report log-probabilities, and of this many more."
    ),
    Option("n", Kind.INTEGER, Group.SAMPLING, "Answers to the prompt, drawn one by one (1)."),
    Option("block_length", Kind.INTEGER, Group.DIFFUSION, "Tokens denoised together."),
    Option(
        "steps",
        Kind.INTEGER,
        Group.DIFFUSION,
        "Denoising steps, per block (LLaDA2) or in all (LLaDA, Dream).",
    ),
    Option("threshold", Kind.NUMBER, Group.DIFFUSION, "Probability that writes a token."),
    Option("remasking", Kind.TEXT, Group.DIFFUSION, f"Which wait: {', '.join(REMASKING_RULES)}."),
    Option("edit_threshold", Kind.NUMBER, Group.DIFFUSION, "Probability that replaces a token."),
    Option("max_post_steps", Kind.INTEGER, Group.DIFFUSION, "Editing passes over a full block."),
    Option("cfg_scale", Kind.NUMBER, Group.DIFFUSION, "Classifier-free guidance."),
    Option("eos_early_stop", Kind.BOOLEAN, Group.DIFFUSION, "Stop inside a block at its end."),
    Option("eps", Kind.NUMBER, Group.DIFFUSION, "Where Dream's schedule ends (0.001)."),
    Option("alg_temp", Kind.NUMBER, Group.DIFFUSION, "Temperature of Dream's choice of positions."),
    Option("factor", Kind.NUMBER, Group.DIFFUSION, "How bold the factor rule is (1)."),
    Option("size", Kind.TEXT, Group.SYNTH, "tiny, small or full.", "tiny"),
    Option(
        "by_expert",
        Kind.BOOLEAN,
        Group.SYNTH,
        "Copy a GGUF model's experts beside it, each in one piece, which is read faster.",
        False,
    ),
    Option("out", Kind.TEXT, Group.SYNTH, "synth's and pack's new folder, calibrate's file."),
    Option("trace", Kind.TEXT, Group.RECORD, "File to write the run's expert routing to."),
    Option(
        "quiet", Kind.BOOLEAN, Group.RECORD, "The answer alone: no plan, no figures.", False, "-q"
    ),
    Option("text", Kind.TEXT, Group.CALIBRATION, "Text file that shows what a model will do."),
    Option("pieces", Kind.INTEGER, Group.CALIBRATION, "Parts of the text that are run.", 16),
    Option(
        "plot",
        Kind.TEXT,
        Group.CALIBRATION,
        "calibrate's folder for pictures of the routing; quality's file for one of its table, "
        "plan's for one of a bidirectional model's passes.",
    ),
    Option(
        "inputs",
        Kind.BOOLEAN,
        Group.CALIBRATION,
        "Record what experts are given, for pack and --format with --calibration.",
        False,
    ),
    Option("buddies", Kind.BOOLEAN, Group.BUDDIES, "Profile stand-ins for each expert.", False),
    Option(
        "alpha",
        Kind.TEXT,
        Group.BUDDIES,
        "Share of an expert's co-activations that its buddies cover, or one for each layer (0.95).",
    ),
    Option("list_size", Kind.NUMBER, Group.BUDDIES, "Fit alpha to so many buddies (mean)."),
    Option("k_max", Kind.INTEGER, Group.BUDDIES, "Buddies of an expert, at most (16)."),
    Option("smoothing", Kind.NUMBER, Group.BUDDIES, "Added to each pair's co-activations (1)."),
    Option(
        "ranking",
        Kind.TEXT,
        Group.BUDDIES,
        "Sort buddies by co-activation, weighted, outputs or weights (co-activation).",
    ),
    Option(
        "similarity",
        Kind.TEXT,
        Group.BUDDIES,
        "Also measure how alike experts are: outputs, weights or both with a comma.",
    ),
    Option(
        "machine",
        Kind.TEXT,
        Group.SIMULATION,
        "A hardware profile: rtx3090, a100-40gb, ... or a TOML file.",
        "rtx3090",
    ),
    Option(
        "presets",
        Kind.TEXT,
        Group.SIMULATION,
        "Policies, separated by commas.",
        "tide,dali,lowtide,lru,fiddler,hybrimoe,layer-split",
    ),
    Option(
        "residents", Kind.NUMBER, Group.SIMULATION, "Share of a layer's experts that fits.", 0.5
    ),
    Option("tau", Kind.INTEGER, Group.SIMULATION, "TIDE's refresh interval in steps.", 4),
    Option("repeats", Kind.INTEGER, Group.BENCH, "Answers of each policy, in turn.", 3),
    Option(
        "setting",
        Kind.TEXTS,
        Group.QUALITY,
        "A row: options of the model and the policy, as 'policy=lru residents=0.5'. A name given "
        "twice makes a row for each of its values.",
    ),
    Option("tokens", Kind.INTEGER, Group.QUALITY, "Tokens of the text that are scored.", 2048),
    Option("window", Kind.INTEGER, Group.QUALITY, "Tokens read in one piece, at most.", 256),
    Option(
        "mask_ratios",
        Kind.TEXT,
        Group.QUALITY,
        "Shares of a diffusion model's tokens to hide.",
        "0.15,0.5,0.9",
    ),
    Option(
        "save_curve",
        Kind.BOOLEAN,
        Group.QUALITY,
        "Measure what mass costs in KL, for max_kl; kept with the buddies.",
        False,
    ),
    Option("choices", Kind.TEXT, Group.QUALITY, "JSON lines of multiple choice to answer."),
    Option("fresh", Kind.BOOLEAN, Group.DOCTOR, "Measure what is stored again.", False),
    Option("profile", Kind.TEXT, Group.DOCTOR, "File for this machine, as simulate takes it."),
    Option("json", Kind.BOOLEAN, Group.OUTPUT, "Print one JSON object and nothing else.", False),
    Option("verbose", Kind.BOOLEAN, Group.OUTPUT, "Say more on standard error.", False, "-v"),
    Option("config", Kind.TEXT, Group.OUTPUT, "A TOML file with any of these options."),
)

_COMMON = {"host_memory", "gpu_memory", "policy", "context", "max_tokens", "temperature", "system"}
_COMMON |= {"json", "verbose"}
_SHARED = {Group.PROMPT, Group.ENGINE, Group.HUB, Group.SAMPLING, Group.DIFFUSION}
_SHARED |= {Group.RECORD, Group.OUTPUT}


def is_common(option: Option) -> bool:
    """Whether `--help` shows it; `--help-all` shows all. What only one verb has is common."""
    return option.name in _COMMON or option.group not in _SHARED


_BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class Settings:
    """The value in force of every option, and which of flag, environment or file gave it."""

    values: Mapping[str, object]
    sources: Mapping[str, str]  # only options that were given

    def __getitem__(self, name: str) -> object:
        return self.values[name]

    def is_given(self, name: str) -> bool:
        return name in self.sources

    def flag(self, name: str) -> bool:
        """A boolean option's value; not given and without a default is false."""
        return bool(self.values[name])

    def text(self, name: str) -> str | None:
        value = self.values[name]
        return None if value is None else str(value)

    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of `LLM` and `plan_model`: what was given or has a default."""
        if self.values["device_option"] and self.values["device"] != "emulated":
            raise UsageError("Device options belong to the emulated device; add --device emulated.")
        chosen = {o.name: self.values[o.name] for o in OPTIONS if o.group is Group.ENGINE}
        chosen |= {name: self.values[name] for name in ("offline", "seed")}
        names = {
            "policy_option": "policy_options",
            "device_option": "device_options",
            "config_override": "config_overrides",
        }
        return {names.get(name, name): value for name, value in chosen.items() if value is not None}

    def sampling_params(self) -> SamplingParams:
        """The request's parameters; what was not given stays at its default. UsageError."""
        return SamplingParams(
            **self._given(Group.SAMPLING),  # type: ignore[arg-type]
            diffusion=DiffusionParams(**self._given(Group.DIFFUSION)),  # type: ignore[arg-type]
        )

    def _given(self, group: Group) -> dict[str, object]:
        return {
            o.name: self.values[o.name]
            for o in OPTIONS
            if o.group is group and self.is_given(o.name)
        }


def resolve(flags: Mapping[str, object], env: Mapping[str, str]) -> Settings:
    """Settings from the flags given, the environment and the file that either of them names.

    flags: option name to raw value; `None` or an empty list is "not given".
    Raises UsageError for an unknown `LOWTIDE_*` variable or file key and for a bad value.
    """
    given = {
        name: (raw, _BY_NAME[name].flag)
        for name, raw in flags.items()
        if raw is not None and raw != []
    }
    from_env = _read_environment(env)
    file = given.get("config", from_env.get("config"))
    from_file = _read_file(Path(str(file[0]))) if file else {}
    raw_values = {**from_file, **from_env, **given}
    values = {option.name: option.default for option in OPTIONS}
    for name, (raw, source) in raw_values.items():
        values[name] = _BY_NAME[name].parse(raw, source)
    return Settings(values, {name: source for name, (_, source) in raw_values.items()})


def _read_environment(env: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    by_env = {option.env: option for option in OPTIONS}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX) or not raw:
            continue
        if variable not in by_env:
            raise UsageError(f"{variable} is not an option.{_suggest(variable, by_env)}")
        option = by_env[variable]
        found[option.name] = (_from_environment(option, raw), variable)
    return found


def _from_environment(option: Option, raw: str) -> object:
    """A repeatable option's variable holds one value, or several as a JSON array or object."""
    if not option.is_repeatable or not raw.lstrip().startswith(("[", "{")):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option.env}: not valid JSON: {error}") from error


def _read_file(path: Path) -> dict[str, tuple[object, str]]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the options file {path}: {error.strerror}.") from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"the options file {path} is larger than {MAX_FILE_BYTES} bytes.")
    try:
        keys = tomllib.loads(content.decode("utf-8-sig"))  # as some editors of Windows save it
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the options file {path} is not valid TOML: {error}") from error
    known = {name: option for name, option in _BY_NAME.items() if name != "config"}
    for key in keys:
        if key not in known:
            raise UsageError(f"{path}: {key!r} is not an option.{_suggest(key, known)}")
    return {key: (value, f"{path}: {key}") for key, value in keys.items()}


def _suggest(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""
