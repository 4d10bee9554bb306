"""Every option of the command line, and the source of its value.

Options of a model, an answer and a server are declared where Python takes them (`EngineConfig`,
`SamplingParams`, `DiffusionParams`, `ServeSettings`), those of the workbench's verbs beside these,
all others here. Each is a flag, an environment variable and a key of a TOML file; flags override
the environment, which overrides the file, which overrides defaults.

Imports no torch, so that a wrong value is refused at once.

    settings = resolve({"host_memory": "2GiB"}, os.environ, Path("lowtide.toml"))
    settings["host_memory"], settings.engine_options(), settings.sampling_params()
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.device_choice import check_device
from lowtide.errors import UsageError
from lowtide.files.json_file import meant, printable
from lowtide.files.regular_file import read_from
from lowtide.option import ENV_PREFIX, Group, Kind, Option, command_option, options_of
from lowtide.params import DiffusionParams, SamplingParams
from lowtide.registry import WORKBENCH_OPTIONS
from lowtide.serve.settings import ServeSettings

MAX_FILE_BYTES = 2**20


_prompt = partial(command_option, Group.PROMPT)
_synth = partial(command_option, Group.SYNTH)
_record = partial(command_option, Group.RECORD, is_common=False)
_calibration = partial(command_option, Group.CALIBRATION)
_doctor = partial(command_option, Group.DOCTOR)
_batch = partial(command_option, Group.BATCH)
_output = partial(command_option, Group.OUTPUT)


def _shared(params: Any) -> tuple[Option, ...]:
    """Return a class's options except those that only Python takes."""
    return tuple(option for option in options_of(params) if option.group is not Group.PYTHON)


_policy = partial(command_option, Group.POLICY, is_common=False)

ENGINE_OPTIONS = _shared(EngineConfig)

WORKBENCH: tuple[Option, ...] = import_module(WORKBENCH_OPTIONS).OPTIONS

OPTIONS: tuple[Option, ...] = (
    *ENGINE_OPTIONS,
    _policy("policy_file", "Python file with policies of your own, known to --policy by name."),
    _prompt(
        "raw",
        "Send the text as it is, without the chat template.",
        False,
        is_common=False,
    ),
    _prompt(
        "think",
        "Think before answering, or not; for models that can do both.",
        kind=Kind.BOOLEAN,
    ),
    _prompt("system", "System message.", kind=Kind.TEXT),
    *_shared(SamplingParams),
    *_shared(DiffusionParams),
    _synth("size", "Size to write: tiny, small or full.", "tiny"),
    _synth(
        "by_expert",
        "Copy a GGUF model's experts into a file beside it, each in one piece: faster to read.",
        False,
    ),
    _synth("out", "Output: a new folder (synth, pack) or a file (calibrate)."),
    _record("trace", "Record expert routing in this file, for simulate."),
    _record("quiet", "Print the answer alone: no plan, no speed.", False, short="-q"),
    _calibration("plot", "Draw a picture into this file (calibrate: pictures into this folder)."),
    *WORKBENCH,
    _doctor("fresh", "Repeat measurements made before.", False),
    *options_of(ServeSettings),
    _batch(
        "input",
        "Requests in OpenAI's batch format; - reads standard input.",
        kind=Kind.PATH,
        short="-i",
    ),
    _batch(
        "output",
        "File for the answers, which a later run resumes; - is standard output.",
        kind=Kind.PATH,
        short="-o",
    ),
    _batch(
        "at_once",
        "Most lines answered at the same time; by default as many as the context holds, at "
        "most 256.",
        kind=Kind.INTEGER,
        low=1,
        high=4096,
    ),
    _batch(
        "shard",
        "Answer only part of the lines: 2/5 is every fifth, from the second on.",
        kind=Kind.TEXT,
    ),
    _batch("in_order", "Sort the answers into the order of the lines at the end.", False),
    _batch("any_model", "Use this model also for lines that name another one.", False),
    _batch("ray", "Answer on all nodes of the Ray cluster at RAY_ADDRESS.", False),
    _batch("strict", "Exit with 1 if a line's answer is an error.", False),
    _output("json", "Print one JSON object and nothing else.", False),
    _output(
        "verbose",
        "Show more: the whole plan, all measurements, where an error came from.",
        False,
        short="-v",
    ),
    _output("config", "TOML file with any of these options.", is_common=False),
)

_BY_NAME = {option.name: option for option in OPTIONS}

FLAGS = {option.keyword: option.flag for option in OPTIONS}
"""Flags by the options' Python names."""


@dataclass(frozen=True)
class Settings:
    """Values of all options, and the flag, variable or file that gave each."""

    values: Mapping[str, object]
    sources: Mapping[str, str]  # only options that were given
    notices: tuple[str, ...] = ()  # variables that set nothing

    def __getitem__(self, name: str) -> object:
        return self.values[name]

    def is_given(self, name: str) -> bool:
        return name in self.sources

    def choice(self, name: str) -> bool | None:
        """Return a boolean option's value, or None if it was not given."""
        return self.flag(name) if self.is_given(name) else None

    def flag(self, name: str) -> bool:
        """Return a boolean option's value; False if it was not given and has no default."""
        return bool(self.values[name])

    def text(self, name: str) -> str | None:
        value = self.values[name]
        return None if value is None else str(value)

    def words(self, options: Sequence[Option]) -> dict[str, str]:
        """Return, by their Python names, the flag of each option or what else gave its value."""
        return {option.keyword: self.sources.get(option.name, option.flag) for option in options}

    def engine_options(self) -> dict[str, Any]:
        """Return keyword arguments of `LLM` and `plan_model`: options given or with a default."""
        if isinstance(options := self.values["device_option"], Mapping) and options:
            check_device(str(self.values["device"]), options)
        chosen = {o.keyword: self.values[o.name] for o in ENGINE_OPTIONS}
        chosen["seed"] = self.values["seed"]
        return {name: value for name, value in chosen.items() if value is not None}

    def sampling_params(self) -> SamplingParams:
        """Return a request's parameters; raises UsageError."""
        inner = DiffusionParams(**self._given(DiffusionParams))
        return SamplingParams(**self._given(SamplingParams), diffusion=inner)

    def serve_settings(self) -> ServeSettings:
        """Return a server's settings; raises UsageError if they contradict each other."""
        return ServeSettings(**self._given(ServeSettings))

    def _given(self, params: Any) -> dict[str, Any]:
        given = [o for o in _shared(params) if self.is_given(o.name)]
        return {o.keyword: self.values[o.name] for o in given}


def resolve(flags: Mapping[str, object], env: Mapping[str, str]) -> Settings:
    """Resolve settings from flags, the environment, and the file that either of them names.

    An unknown `LOWTIDE_*` variable, which another version may use, is a notice. Raises UsageError
    for an unknown file key and for a bad value.

    flags: option name to raw value; `None` or an empty list is "not given".
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
    sources = {name: source for name, (_, source) in raw_values.items()}
    return Settings(values, sources, _unknown_in(env))


def _read_environment(env: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}
    by_env = {option.env: option for option in OPTIONS}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX) or not raw:
            continue
        option = by_env.get(variable)
        if option is not None:
            found[option.name] = (_from_environment(option, raw), variable)
    return found


def _unknown_in(env: Mapping[str, str]) -> tuple[str, ...]:
    known = [option.env for option in OPTIONS]
    unknown = sorted(name for name in env if name.startswith(ENV_PREFIX) and name not in known)
    return tuple(
        f"{printable(name)} in the environment is not an option and is ignored.{meant(name, known)}"
        for name in unknown
    )


def _from_environment(option: Option, raw: str) -> object:
    """Parse a repeatable option's variable: one value, or several as a JSON array or object."""
    if not option.is_repeatable or not raw.lstrip().startswith(("[", "{")):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option.env}: not valid JSON: {error}") from error


_LISTED = " lowtide generate --help lists them."


def _read_file(path: Path) -> dict[str, tuple[object, str]]:
    try:
        with path.open("rb") as file:
            content = read_from(file, MAX_FILE_BYTES + 1, f"the options file {path}", UsageError)
    except OSError as error:
        told = f"cannot read the options file {path}: {error.strerror}"
        raise UsageError(f"{told}; give --config the path of a TOML file.") from error
    if len(content) > MAX_FILE_BYTES:
        told = f"the options file {path} is larger than {MAX_FILE_BYTES} bytes"
        raise UsageError(f"{told}; give --config another.")
    try:
        keys = tomllib.loads(content.decode("utf-8-sig"))  # as some editors of Windows save it
    except (ValueError, RecursionError) as error:
        told = f"the options file {path} is not valid TOML: {error}"
        raise UsageError(f"{told}; its lines are as context = 4096.") from error
    known = {name: option for name, option in _BY_NAME.items() if name != "config"}
    for key in keys:
        if key not in known:
            raise UsageError(f"{path}: {key!r} is not an option.{meant(key, known) or _LISTED}")
    return {key: (value, f"{key} in {path}") for key, value in keys.items()}
