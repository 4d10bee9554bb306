"""Options: one table for flags, environment and file; precedence; refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.cli.options import MAX_FILE_BYTES, OPTIONS, resolve
from lowtide.errors import UsageError
from lowtide.option import Kind
from lowtide.params import DiffusionParams, SamplingParams


def write(folder: Path, text: str) -> str:
    path = folder / "options.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_names_are_unique() -> None:
    assert len({o.env for o in OPTIONS} | {o.flag for o in OPTIONS}) == 2 * len(OPTIONS)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'policy = "lru"\ncontext = 7\nhost_memory = "1GiB"\nsteps = 3\n')
    env = {"LOWTIDE_CONFIG": file, "LOWTIDE_CONTEXT": "8", "LOWTIDE_HOST_MEMORY": "2GiB"}
    settings = resolve({"host_memory": "3GiB", "policy": None, "stop": []}, env)
    assert settings["host_memory"] == "3GiB"
    assert settings["context"] == 8
    assert settings["policy"] == "lru"
    assert settings["device"] == "auto"
    assert settings.sampling_params().diffusion == DiffusionParams(steps=3)


def test_what_is_not_given_stays_at_the_parameters_own_defaults() -> None:
    assert resolve({}, {}).sampling_params() == SamplingParams()


def test_engine_options_leave_out_what_was_not_given() -> None:
    options = resolve({"policy_option": ["tau=2"], "seed": "5"}, {}).engine_options()
    assert options["policy_options"] == {"tau": "2"}
    assert options["seed"] == 5
    assert "context" not in options and "config_overrides" not in options


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("config_override", ["mask_token_id=7", 'name="x"'], {"mask_token_id": 7, "name": "x"}),
        ("policy_option", ["a=1", "b=x=y"], {"a": "1", "b": "x=y"}),
        ("stop", ["\n\n", "end"], ["\n\n", "end"]),
        ("host_memory", "80%", "80%"),
        ("host_memory", "123456", "123456"),
        ("threshold", "0.5", 0.5),
        ("context", "8k", 8192),
        ("ignore_eos", False, False),
        ("kv_cache", "false", False),
        ("kv_cache", "on", True),
        ("kv_cache", "Dual", "dual"),
        ("kv_cache", "prefix", "prefix"),
    ],
)
def test_flags_are_parsed(name: str, raw: object, value: object) -> None:
    assert resolve({name: raw}, {})[name] == value


@pytest.mark.parametrize(
    ("variable", "raw", "name", "value"),
    [
        ("LOWTIDE_STOP", '["a", "b"]', "stop", ["a", "b"]),
        ("LOWTIDE_STOP", "one", "stop", ["one"]),
        ("LOWTIDE_POLICY_OPTION", "tau=4", "policy_option", {"tau": "4"}),
        ("LOWTIDE_POLICY_OPTION", '{"tau": 4}', "policy_option", {"tau": "4"}),
        ("LOWTIDE_CONFIG_OVERRIDE", '{"a": [1]}', "config_override", {"a": [1]}),
        ("LOWTIDE_IGNORE_EOS", "Yes", "ignore_eos", True),
        ("LOWTIDE_KV_CACHE", "0", "kv_cache", False),
        ("LOWTIDE_CONTEXT", "", "context", None),
    ],
)
def test_variables_are_parsed(variable: str, raw: str, name: str, value: object) -> None:
    assert resolve({}, {variable: raw, "PATH": "/bin"})[name] == value


def test_files_hold_tables_and_native_values(tmp_path: Path) -> None:
    text = 'host_memory = 1024\nkv_cache = false\nstop = ["a"]\n'
    text += "[policy_option]\ntau = 4\n[config_override]\nmask_token_id = 9\n"
    settings = resolve({"config": write(tmp_path, text)}, {})
    assert settings["host_memory"] == "1024"
    assert settings["kv_cache"] is False
    assert settings["policy_option"] == {"tau": "4"}
    assert settings["config_override"] == {"mask_token_id": 9}


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("context", "many", "--context"),
        ("context", "1" * 5000, "--context"),
        ("host_memory", "10 parsecs", "--host-memory"),
        ("host_memory", "-1", "--host-memory"),
        ("threshold", "1.5", "--threshold must be a number from 0 to 1"),
        ("remasking", "least", "--remasking 'least' is not known; choose low_confidence"),
        ("kernels", "fast", "--kernels 'fast' is not known; choose auto, reference"),
        ("threshold", "high", "--threshold"),
        ("policy_option", ["tau"], "NAME=VALUE"),
        ("policy_option", ["=4"], "NAME=VALUE"),
        ("config_override", ["a=b"], "double quotes"),
        ("config_override", ["a=" + "[" * 100_000], "JSON"),
        ("dtype", "", "--dtype"),
    ],
)
def test_bad_flags_name_themselves(name: str, raw: object, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({name: raw}, {})
    assert said in str(caught.value) and len(str(caught.value)) < 300


def test_an_unknown_variable_is_told_once_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"LOWTIDE_HOST_MEMROY": "1GiB", "LOWTIDE_X\x1b": "", "LOWTIDE_CONTEXT": "64"}
    settings = resolve({}, variables)
    first, second = settings.notices
    assert "LOWTIDE_HOST_MEMROY" in first and first.endswith("Did you mean LOWTIDE_HOST_MEMORY?")
    assert "LOWTIDE_X\\x1b" in second and settings["context"] == 64
    monkeypatch.setenv("LOWTIDE_HOST_MEMROY", "1GiB")
    result = CliRunner().invoke(app, ["ls"])
    assert result.exit_code == 0 and result.stderr.count("LOWTIDE_HOST_MEMROY") == 1


def test_an_unknown_key_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean threshold"):
        resolve({"config": write(tmp_path, "treshold = 0.9")}, {})
    with pytest.raises(UsageError, match="'config' is not an option"):
        resolve({"config": write(tmp_path, 'config = "other"')}, {})


def test_a_bad_value_in_the_file_names_file_and_key(tmp_path: Path) -> None:
    file = write(tmp_path, "context = true")
    with pytest.raises(UsageError, match=r"context in .*options\.toml: expected"):
        resolve({"config": file}, {})
    file = write(tmp_path, "temperature = 1" + 400 * "0")  # which no float is
    with pytest.raises(UsageError, match=r"temperature in .*options\.toml: expected a number"):
        resolve({"config": file}, {})


def test_a_file_may_begin_with_the_mark_of_some_editors(tmp_path: Path) -> None:
    file = write(tmp_path, '\ufeffpolicy = "lru"\r\ncontext = 7\r\n')
    settings = resolve({"config": file}, {})
    assert (settings["policy"], settings["context"]) == ("lru", 7)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        resolve({"config": str(tmp_path / "absent.toml")}, {})
    with pytest.raises(UsageError, match="cannot read"):
        resolve({"config": str(tmp_path)}, {})
    with pytest.raises(UsageError, match="not valid TOML"):
        resolve({"config": write(tmp_path, "a = ")}, {})
    with pytest.raises(UsageError, match="larger than"):
        resolve({"config": write(tmp_path, "#" * (MAX_FILE_BYTES + 1))}, {})
    (tmp_path / "latin.toml").write_bytes(b"policy = '\xff'")
    with pytest.raises(UsageError, match="not valid TOML"):
        resolve({"config": str(tmp_path / "latin.toml")}, {})


def test_device_options_need_the_device_they_are_for() -> None:
    with pytest.raises(UsageError, match="`device` emulated"):
        resolve({"device_option": ["link_GBps=20"]}, {}).engine_options()
    options = resolve(
        {"device": "emulated", "device_option": ["link_GBps=20"]}, {}
    ).engine_options()
    assert options["device_options"] == {"link_GBps": "20"}


@given(st.sampled_from(OPTIONS), st.text(max_size=20))
def test_any_text_is_a_value_or_a_usage_error(option: object, text: str) -> None:
    raw = [text] if option.is_repeatable else text  # type: ignore[attr-defined]
    if option.kind is Kind.BOOLEAN or option.name == "config":  # type: ignore[attr-defined]
        return
    try:
        settings = resolve({option.name: raw}, {})  # type: ignore[attr-defined]
    except UsageError:
        return
    assert settings.is_given(option.name)  # type: ignore[attr-defined]
