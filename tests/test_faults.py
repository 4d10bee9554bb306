"""Bad input, failing files and Ctrl-C: a clear error, nothing left behind, and life goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from programs import python
from test_regular_file import at_once
from typer.testing import CliRunner
from whole import Setting, check_idle, no_more_threads, reads_counted, reads_in_python

from lowtide import SamplingParams
from lowtide.cli.app import app
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.request import Draft, Event
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.running import not_finite
from lowtide.engine.running.wiring import load
from lowtide.errors import (
    CheckpointError,
    LowtideError,
    NumericError,
    PlanError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import ExpertSlots
from lowtide.families.llada2.model import LLaDA2
from lowtide.llm import LLM
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_writing.synth import synth
from lowtide.reading.file_reader import FileReader

INDEX = "model.safetensors.index.json"
PROMPT = [5, 17, 3]
PARAMS = SamplingParams(max_tokens=72)


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("llada2", "tiny", tmp_path_factory.mktemp("faults") / "model", seed=5)


@pytest.fixture
def model(whole_model: Path, tmp_path: Path) -> Path:
    """A copy of one's own to be damaged: a few shards and an index."""
    return Path(shutil.copytree(whole_model, tmp_path / "model"))


# Damage


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_shard(model: Path) -> None:
    shards(model)[1].unlink()


def without_shard_and_index(model: Path) -> None:
    shards(model)[1].unlink()
    (model / INDEX).unlink()


def truncated_shard(model: Path) -> None:
    path = shards(model)[-1]
    os.truncate(path, path.stat().st_size - 100)


def index_naming(name: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        weight_map = json.loads((model / INDEX).read_text())["weight_map"]
        weight_map[next(iter(weight_map))] = name
        edit_json(model / INDEX, weight_map=weight_map)

    return damage


def config_saying(**changes: Any) -> Callable[[Path], None]:
    return lambda model: edit_json(model / "config.json", **changes)


def large_tokenizer(model: Path) -> None:
    """One token more than there are rows of the embedding."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {"one too many": 320}
    edit_json(model / "tokenizer.json", model=tokenizer["model"] | {"vocab": vocabulary})


def nan_weight(model: Path) -> None:
    """One bfloat16 NaN in the middle of an expert."""
    checkpoint = Checkpoint.open(model)
    entry = checkpoint.tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    with checkpoint.files[entry.file].path.open("r+b") as file:
        file.seek(entry.offset + 100)
        file.write(b"\xc0\x7f")


class Fault(NamedTuple):
    """A damaged model or a bad wish, and how it is to be refused."""

    damage: Callable[[Path], None]
    error: type[LowtideError]
    said: str  # a pattern
    options: dict[str, Any] = {}


def nothing(model: Path) -> None:
    pass


FAULTS = {
    "missing shard": Fault(
        without_shard, CheckpointError, r"1 is missing \(model-00002-of-\d+.*fetch"
    ),
    "missing shard, no index": Fault(
        without_shard_and_index, CheckpointError, r"holds \d+ of \d+ shards; number 2 is missing"
    ),
    "truncated shard": Fault(truncated_shard, CheckpointError, r"byte \d+ of \d+ data bytes"),
    "index with a missing file": Fault(
        index_naming("absent.safetensors"),
        CheckpointError,
        r"1 is missing \(absent\.safetensors\); fetch",
    ),
    "unknown architecture": Fault(
        config_saying(architectures=["MysteryLM"]), LowtideError, r"MysteryLM.*LLaDA2MoeModelLM"
    ),
    "more experts than there are tensors": Fault(
        config_saying(num_experts=128), CheckpointError, r"128"
    ),
    "large tokenizer": Fault(large_tokenizer, CheckpointError, r"ids up to 320.*ends at 319"),
    "broken weights": Fault(
        nan_weight,
        CheckpointError,
        r"layers\.2\.mlp\.experts\.7\.up_proj\.weight.*NaN",
        {"check_weights": True},
    ),
    "small budget": Fault(
        nothing, PlanError, r"at least .*\(\d+ bytes\).*expert slots", {"host_memory": "64KiB"}
    ),
    "resident in a small budget": Fault(
        nothing, UsageError, r"\d+ bytes\) too small", {"host_memory": "8MiB", "policy": "resident"}
    ),
    "immense context": Fault(nothing, UsageError, r"1 to 268435456.*10{12}", {"context": 10**12}),
    "context above the budget": Fault(
        nothing,
        PlanError,
        r"KV cache of 8000000 tokens",
        {"context": 8 * 10**6, "host_memory": "1GiB"},
    ),
    "unknown policy": Fault(nothing, UsageError, r"'fortune'.*tide", {"policy": "fortune"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_model_is_refused_before_any_weight_is_read(model: Path, name: str) -> None:
    damage, error, said, options = FAULTS[name]
    damage(model)
    with nothing_left(model), reads_counted() as reads, pytest.raises(error) as caught:
        LLM(model, **options)
    assert re.search(said, str(caught.value), re.DOTALL), caught.value
    assert not reads


@pytest.mark.parametrize("name", ["missing shard", "broken weights", "small budget"])
def test_the_command_line_says_so_in_one_line(model: Path, name: str) -> None:
    damage, _, said, options = FAULTS[name]
    damage(model)
    result = refused(model, "--prompt-ids", "5 17 3", *flags(options))
    assert re.search(said, result.stderr, re.DOTALL)


BAD_REQUESTS = {
    "id out of range": (["--prompt-ids", "5 320"], r"320.*0 to 319"),
    "beyond the context": (
        ["--prompt-ids", "5", "--max-tokens", "100000"],
        r"1 prompt tokens and 100000 new ones",
    ),
    "block too long": (["--prompt-ids", "5", "--block-length", "257"], "257.*256"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_before_any_weight_is_read(whole_model: Path, name: str) -> None:
    arguments, said = BAD_REQUESTS[name]
    result = refused(whole_model, *arguments)
    assert re.search(said, result.stderr, re.DOTALL)


def refused(model: Path, *arguments: str) -> Any:
    """The result of a `generate --json` that must fail: one object, one line, no weight read."""
    with nothing_left(model), reads_counted() as reads:
        result = CliRunner().invoke(app, ["generate", str(model), "--json", *arguments])
    assert result.exit_code in (1, 2), result.output
    error = json.loads(result.stdout)["error"]
    assert error["type"].endswith("Error")
    assert error["message"] in result.stderr.replace("\n", "") or error["message"] in result.stderr
    assert "Traceback" not in result.output
    assert not reads
    return result


def flags(options: dict[str, Any]) -> list[str]:
    arguments = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        arguments += [flag] if value is True else [flag, str(value)]
    return arguments


def test_bad_prompts_are_refused_before_the_first_step(whole_model: Path) -> None:
    with nothing_left(whole_model), LLM(whole_model) as llm:
        for prompt in ([[]], [5, 320], [5, -1], [[5], [320]], "", [True], [2**70]):
            with pytest.raises(UsageError, match="empty|0 to 319"):
                llm.generate(prompt)
            with pytest.raises(UsageError, match="empty|0 to 319"):
                llm.logits([5, 320])
        with pytest.raises(PlanError, match="40000"):
            llm.generate([5] * 40000, PARAMS)
        with pytest.raises(PlanError, match="5000"):
            llm.logits([5] * 5000)
        with pytest.raises(UnsupportedError, match="cfg_scale"):
            guided = SamplingParams(diffusion=PARAMS.diffusion.__class__(cfg_scale=2.0))
            llm.generate([5], guided)
        with pytest.raises(UsageError, match=str(10**12)):
            SamplingParams(max_tokens=10**12)
        assert llm.stats()["forwards"] == 0
        check_idle(llm)


@contextmanager
def nothing_left(model: Path) -> Iterator[None]:
    """Checks that no thread, no open file and no new file outlives what is done inside."""
    sizes, num_open = file_sizes(model), Counter(open_files(model))
    with no_more_threads():
        yield
    assert file_sizes(model) == sizes and not Counter(open_files(model)) - num_open


def file_sizes(model: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in model.rglob("*")}


def open_files(model: Path, process: int | str = "self") -> list[str]:
    links = []
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except FileNotFoundError:  # the listing's own
            continue
    return [link for link in links if link.startswith(str(model))]


# Failing while it runs


LEAST = Setting("tide", 0.1)


class Reference(NamedTuple):
    token_ids: list[int]
    logits: Any


def reference(model: Path) -> Reference:
    with LEAST.open(model) as llm:
        return ask(llm)


@pytest.fixture(scope="module")
def expected(whole_model: Path) -> Reference:
    return reference(whole_model)


def ask(llm: LLM) -> Reference:
    [completion] = llm.generate(PROMPT, PARAMS)
    return Reference(completion.token_ids, llm.logits(completion.token_ids))


def check_still_right(llm: LLM, expected: Reference) -> None:
    check_idle(llm)
    result = ask(llm)
    assert result.token_ids == expected.token_ids
    assert (result.logits == expected.logits).all()
    check_idle(llm)


@pytest.mark.parametrize("at", [1, 4])
def test_a_file_truncated_while_generating(model: Path, expected: Reference, at: int) -> None:
    """A file that was written to is not read again, even once whole: another object reads it."""
    path = max(shards(model), key=lambda p: "experts.31" in str(p))
    contents = {path: path.read_bytes() for path in shards(model)}
    steps, seen, step = 0, 0, BatchDecoder.step

    def truncate_after(decoder: BatchDecoder) -> list[Event]:
        nonlocal steps
        events = step(decoder)
        steps += any(isinstance(event, Draft) for event in events)
        if steps == at:
            for path in contents:
                os.truncate(path, path.stat().st_size // 2)
        return events

    def count(event: Event) -> None:
        nonlocal seen
        seen += isinstance(event, Draft)

    with nothing_left(model), LEAST.open(model) as llm:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchDecoder, "step", truncate_after)
            with pytest.raises(StorageError, match=r"ends at byte \d+.*truncated"):
                llm.generate(PROMPT, PARAMS, count)
        assert seen == steps == at
        check_idle(llm)
        with pytest.raises(StorageError):
            llm.generate(PROMPT, PARAMS)
        for path, data in contents.items():
            path.write_bytes(data)  # the same file, not a new one in its place
        with pytest.raises(StorageError, match="was written to after it was opened"):
            llm.generate(PROMPT, PARAMS)
        check_idle(llm)
    with LEAST.open(model) as llm:
        check_still_right(llm, expected)


def test_a_file_rewritten_in_place_while_generating(model: Path, expected: Reference) -> None:
    """With other weights: no answer is made of both."""

    step = BatchDecoder.step

    def rewrite_after(decoder: BatchDecoder) -> list[Event]:
        events = step(decoder)
        for path in shards(model):
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(bytes(1000))
        return events

    with LEAST.open(model) as llm:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchDecoder, "step", rewrite_after)
            with pytest.raises(StorageError, match="was written to after it was opened"):
                llm.generate(PROMPT, PARAMS)
        check_idle(llm)


def test_a_checkpoint_deleted_while_generating_is_read_to_the_end(
    model: Path, expected: Reference
) -> None:
    """An open file stays; only the next open finds nothing."""

    def delete(event: Event) -> None:
        shutil.rmtree(model, ignore_errors=True)

    with LEAST.open(model) as llm:
        [completion] = llm.generate(PROMPT, PARAMS, delete)
        assert completion.token_ids == expected.token_ids and not model.exists()
        assert llm.stats()["num_misses"] > 0
        check_still_right(llm, expected)
    with pytest.raises(LowtideError, match="There is no file or folder"):
        LLM(model)


def test_a_file_truncated_before_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its header was checked and before its weights are read."""
    submit = FileReader.submit

    def truncate_first(reader: FileReader, reads: Sequence[Any]) -> Any:
        for path in shards(model):
            os.truncate(path, 2000)
        return submit(reader, reads)

    monkeypatch.setattr(FileReader, "submit", truncate_first)
    with no_more_threads(), pytest.raises(StorageError, match="truncated"):
        LLM(model)
    assert not open_files(model)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def a_link_to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def another_file(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


@pytest.mark.parametrize("check_weights", [False, True])
@pytest.mark.parametrize("swap", [a_pipe, zeros, a_link_to_zeros, another_file])
def test_what_was_checked_is_what_is_read(
    model: Path, swap: Callable[[Path], None], check_weights: bool
) -> None:
    """A shard that becomes something else between the checks and the reads."""
    opened = open_model(model, EngineConfig(policy="static", check_weights=check_weights))
    plan = make_plan(opened)
    swap(shards(model)[1])
    said = pytest.raises(StorageError, match="model-00002-of.* (changed|not a regular)")
    with no_more_threads(), at_once(), said:
        load(opened, plan)
    assert not open_files(model)


def write_weights(model: Path, name: str, bits: int) -> Path:
    """Every bfloat16 weight of a tensor becomes that; returns its file."""
    checkpoint = Checkpoint.open(model)
    entry = checkpoint.tensors[name]
    path = checkpoint.files[entry.file].path
    with path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(bits.to_bytes(2, "little") * (entry.num_bytes // 2))
    return path


HUGE, NAN, OVERFLOWING = 0x4748, 0x7FC0, 0x7149  # bfloat16: 51,200; no number; 1e30


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of each time that weights are looked through: others wait for passes meanwhile."""
    asked: list[Any] = []
    check_finite = not_finite.check_finite

    def noting(*arguments: Any) -> float:
        asked.append(arguments)
        return check_finite(*arguments)

    monkeypatch.setattr(not_finite, "check_finite", noting)
    return asked


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.2.mlp.experts.7.down_proj.weight"]
)
def test_weights_that_are_not_numbers_are_the_checkpoints_fault(
    model: Path, name: str, searches: list[Any]
) -> None:
    path = write_weights(model, name, NAN)
    with nothing_left(model), LLM(model) as llm:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=f"{name} in .*{path.name} holds an inf") as e:
                llm.generate(list(range(100)), PARAMS)
            found = e.value.__cause__  # what the engine's thread raised
            assert found is not None and "position" in str(found.__context__)
            check_idle(llm)
    assert len(searches) == 1


def test_weights_that_overflow_in_the_compute_type(model: Path) -> None:
    path = write_weights(model, "model.norm.weight", OVERFLOWING)
    with LLM(model, dtype="float16") as llm:
        said = rf"model\.norm\.weight in .*{path.name} holds a weight of BF16 .*infinite in F16"
        with pytest.raises(CheckpointError, match=said):
            llm.generate(PROMPT, PARAMS)


def test_float32_that_overflows_has_a_way_out(model: Path) -> None:
    for name in ("model.norm.weight", "lm_head.weight"):
        write_weights(model, name, OVERFLOWING)
    said = r"float32 overflowed\. Choose `kernels` 'reference', and report it"
    with LLM(model, dtype="float32") as llm, pytest.raises(NumericError, match=said):
        llm.generate(PROMPT, PARAMS)


def test_arithmetic_that_overflows_is_not_the_checkpoints_fault(
    model: Path, monkeypatch: pytest.MonkeyPatch, searches: list[Any]
) -> None:
    write_weights(model, "model.norm.weight", HUGE)
    write_weights(model, "lm_head.weight", HUGE)
    write_weights(model, "model.layers.2.mlp.gate.weight", HUGE)
    checked = r"not finite.* all weights are finite: float16 overflowed\. Choose `dtype` bfloat16"
    with LLM(model, dtype="float16") as llm:
        with pytest.raises(NumericError, match=checked):
            llm.generate(PROMPT, PARAMS)
        with pytest.raises(NumericError, match=checked):
            llm.logits(PROMPT)
    assert len(searches) == 1
    monkeypatch.setattr(not_finite, "SEARCH_S", 0.0)
    with LLM(model, dtype="float16") as llm, pytest.raises(NumericError, match="the 0% of weigh"):
        llm.generate(PROMPT, PARAMS)


class Interrupter:
    """Raises KeyboardInterrupt at the call of one method with a number, once."""

    def __init__(self, owner: type, name: str, is_after: bool = False) -> None:
        self.owner, self.name, self.is_after = owner, name, is_after
        self.num_calls = 0

    @contextmanager
    def armed(self, at: int) -> Iterator[None]:
        """`at`: 0 is the first call."""
        real = getattr(self.owner, self.name)
        self.num_calls = 0

        def call(*arguments: Any, **named: Any) -> Any:
            number, self.num_calls = self.num_calls, self.num_calls + 1
            if number == at and not self.is_after:
                raise KeyboardInterrupt
            result = real(*arguments, **named)
            if number == at:
                raise KeyboardInterrupt
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.owner, self.name, call)
            yield


CHECKPOINTS = {
    "before a read starts": Interrupter(FileReader, "submit"),
    "after a read has started": Interrupter(FileReader, "submit", is_after=True),
    "before a layer's experts": Interrupter(ExpertRuntime, "forward"),
    "after a layer's experts": Interrupter(ExpertRuntime, "forward", is_after=True),
    "in an expert's use": Interrupter(ExpertSlots, "weights"),
    "before a pass": Interrupter(LLaDA2, "forward"),
    "after a pass": Interrupter(LLaDA2, "forward", is_after=True),
    "before logits": Interrupter(LLaDA2, "logits"),
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_ctrl_c_while_generating(whole_model: Path, expected: Reference, checkpoint: str) -> None:
    interrupter = CHECKPOINTS[checkpoint]
    # No compiled thread does what a `FileReader` is asked for.
    readers = reads_in_python() if interrupter.owner is FileReader else nullcontext()
    with readers, nothing_left(whole_model), LEAST.open(whole_model) as llm:
        for at in (0, 1, 2, 7, 20):
            with interrupter.armed(at), pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT, [*PROMPT, 9]], PARAMS)
            check_idle(llm)
            assert interrupter.num_calls > at
        with interrupter.armed(0), pytest.raises(KeyboardInterrupt):
            llm.logits([5] * 40)
        check_idle(llm)
        check_still_right(llm, expected)


@pytest.mark.parametrize("at", [0, 1, 5, 30, 60])
@pytest.mark.parametrize("is_after", [False, True])
def test_ctrl_c_while_loading(whole_model: Path, at: int, is_after: bool) -> None:
    """Dense weights first, then experts: both are interrupted at some of these."""
    interrupter = Interrupter(FileReader, "await_work", is_after)
    with nothing_left(whole_model), interrupter.armed(at), pytest.raises(KeyboardInterrupt):
        LLM(whole_model, policy="static")


def test_a_real_ctrl_c_ends_the_program_quietly(whole_model: Path) -> None:
    """SIGINT as soon as it is known to be at work: a progress report comes from inside."""
    program = (
        "import os, signal, sys\n"
        "from lowtide.decode.batch_decoder import BatchDecoder\n"
        "step = BatchDecoder.step\n"
        "def interrupted(self):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return step(self)\n"
        "BatchDecoder.step = interrupted\n"
        f"sys.argv = ['lowtide', 'generate', {str(whole_model)!r}, '--prompt-ids', '5 17 3']\n"
        "from lowtide.cli.main import main\n"
        "main()"
    )
    result = python("-c", program)
    check_quiet_end(result.returncode, result.stderr)


def check_quiet_end(code: int, errors: str) -> None:
    assert code == 130, errors
    assert "Traceback" not in errors and "Error" not in errors
