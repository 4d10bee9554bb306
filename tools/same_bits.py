"""Compares the bits of this working tree with those of another commit, on this machine.

    python tools/same_bits.py main               # a hundred drawn runs
    python tools/same_bits.py main --runs 400 --seed 7

A run is a random tiny model under drawn options: its answers' token ids and its logits. The list of
runs is the same for both trees, each of which executes it in processes of its own, one for each
kernel variant that this machine can pretend to have (`tests/machines.py`). Prints the runs that
differ and exits 1, else one line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

MACHINES = (
    "",
    "kernels-avx512-bf16",
    "kernels-avx512",
    "kernels-avx2",
    "kernels-portable",
    "reference-kernels",
    "no-compiler",
)
"""Names in `tests/machines.py`, "" for this machine as it is."""

_WITHOUT_EXPERTS = ("dream", "llada")
_ROUNDED = ("gpt_oss", "rounded")  # as published: no other format can be made of them
_GGUF_FAMILIES = ("qwen3_moe", "deepseek_v2")
_GGUF_TYPES = ("Q4_0", "Q4_K")
_EMULATED = {"link_GBps": "2", "link_latency_us": "20", "host_slowdown": "1"}
_CONTEXT = 1024
_LIMIT_S = 900.0

Run = dict[str, Any]
Result = dict[str, Any]
"""`ids` and `logits` of a run; or `refused`, an error's name; or `failed`, a bug's text."""


def main() -> int:
    """0 where all runs are the same."""
    parser = argparse.ArgumentParser(description="Ids and logits beside those of another commit.")
    parser.add_argument("commit", metavar="COMMIT")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lowtide-same-bits-") as name:
        folder = Path(name)
        other = _extracted(options.commit, folder / "commit")
        runs = draw(make_models(folder / "models"), options.runs, options.seed)
        num_refused, different = compare((other, ROOT), runs)
    for line in different:
        print(line)
    title = f"{len(runs)} runs ({num_refused} refused by both), beside {options.commit}"
    print(f"{title}: {len(different)} differ" if different else f"{title}: the same bits")
    return 1 if different else 0


def _extracted(commit: str, folder: Path) -> Path:
    """The sources and the pretended machines of a commit."""
    folder.mkdir()
    git = ["git", "-C", str(ROOT), "archive", commit, "src", "tests/machines.py"]
    archive = subprocess.run(git, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


# What is run


def make_models(folder: Path) -> list[Path]:
    """Tiny models of every family, and of packed formats; made by this tree alone."""
    sys.path[:0] = [str(ROOT / each) for each in ("src", "tests", "benchmarks")]
    import gguf_oracle
    from gguf_files import write_gguf
    from rounded_files import write_rounded

    from lowtide.families import families
    from lowtide.model_writing.synth import synth

    # It warns of keys that the tests write twice.
    logging.getLogger("gguf").setLevel(logging.ERROR)
    models = [synth(family, "tiny", folder / family) for family in families()]
    models.append(write_rounded(folder / "qwen3_moe", folder / "fp8", "fp8")[0])
    for family in _GGUF_FAMILIES:
        for kind in _GGUF_TYPES:
            model = gguf_oracle.random_model(family, 0)
            models.append(folder / f"{family}-{kind}.gguf")
            write_gguf(models[-1], family, model, partial(_type, kind))
    return models + sorted((ROOT / "tests" / "llama_files").glob("*.gguf"))


def _type(kind: str, name: str, shape: tuple[int, ...]) -> Any:
    """`kind`, where rows divide into its blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if "norm" in name or "gate_inp" in name:
        return GGMLQuantizationType.F32
    wanted = (GGMLQuantizationType[each] for each in (kind, "Q8_0", "F16"))
    return next(each for each in wanted if shape[-1] % GGML_QUANT_SIZES[each][0] == 0)


def draw(models: Sequence[Path], num_runs: int, seed: int) -> list[Run]:
    """Every model in turn, everything else at random."""
    rng = random.Random(seed)
    return [_drawn(rng, models[i % len(models)]) for i in range(num_runs)]


def _drawn(rng: random.Random, model: Path) -> Run:
    from lowtide.policies.presets import lossless_presets

    is_folder = model.is_dir()
    formats = (None, None, "q8", "q4") if is_folder and model.name not in _ROUNDED else (None,)
    has_experts = model.name not in _WITHOUT_EXPERTS
    options: dict[str, Any] = {
        "dtype": rng.choice(("bfloat16", "bfloat16", "float32")),
        "format": rng.choice(formats),
        "device": "cpu",
    }
    if has_experts:
        options["policy"] = rng.choice(("resident", *lossless_presets()))
        options |= rng.choice(({}, {}, {}, {"device": "emulated"}))
    if options["device"] == "emulated":
        options["device_options"] = _EMULATED
    if options["format"] or not is_folder:
        options["activations"] = "int8" if rng.random() < 0.25 else "own"
    num_ids = 300 if is_folder else 90
    lengths = rng.choices((1, 2, 9, 40, 200, 700), (3, 3, 4, 4, 2, 1), k=rng.randint(1, 3))
    return {
        "model": str(model),
        "machine": rng.choice(MACHINES),
        "options": options,
        "share": 1.0
        if options.get("policy") == "resident"
        else rng.choice((0, 1, 1)) * rng.random(),
        "prompts": [[rng.randrange(1, num_ids) for _ in range(length)] for length in lengths],
        "params": {
            "max_tokens": rng.randint(1, 32),
            "temperature": rng.choice((0.0, 0.0, 0.8)),
            "seed": rng.randrange(1000),
            "ignore_eos": True,
        },
    }


# Both trees


def compare(trees: tuple[Path, Path], runs: Sequence[Run]) -> tuple[int, list[str]]:
    """Count the runs that both trees refuse; return a line for each that differs or fails."""
    first, second = (executed(tree, runs) for tree in trees)
    lines = []
    for run, one, other in zip(runs, first, second, strict=True):
        if one != other or "failed" in one:
            lines.append(f"{_settings(run)}\n    {_difference(one, other)}")
    return sum("refused" in one for one in first), lines


def executed(tree: Path, runs: Sequence[Run]) -> list[Result]:
    """The runs of one tree, in a process for each machine."""
    results: list[Result] = [{} for _ in runs]
    for machine in MACHINES:
        places = [i for i, run in enumerate(runs) if run["machine"] == machine]
        if places:
            found = _in_process(tree, machine, [runs[i] for i in places])
            for i, result in zip(places, found, strict=True):
                results[i] = result
    return results


def _in_process(tree: Path, machine: str, runs: Sequence[Run]) -> list[Result]:
    code = f"import same_bits; same_bits.work({str(tree)!r}, {machine!r})"
    paths = [str(tree / "src"), str(tree / "tests"), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(runs),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{tree} on {machine or 'this machine'}: {done.stderr}")
    return json.loads(done.stdout)


def _settings(run: Run) -> str:
    lengths = "+".join(str(len(prompt)) for prompt in run["prompts"])
    told = {"share": round(run["share"], 3), **run["options"], **run["params"]}
    named = ", ".join(f"{name}={value}" for name, value in told.items())
    machine = run["machine"] or "as it is"
    return f"{Path(run['model']).name} on {machine}: {named}, prompts of {lengths}"


def _difference(one: Result, other: Result) -> str:
    if "ids" not in one or "ids" not in other:
        shown = [result if "ids" not in result else "an answer" for result in (one, other)]
        return f"{shown[0]}, here {shown[1]}"
    same = [name for name in ("ids", "logits") if one[name] == other[name]]
    if "ids" in same:
        return "other logits, the same ids"
    pairs = zip(sum(one["ids"], []), sum(other["ids"], []), strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
    return f"other ids from token {place} on, " + ("the same" if same else "other") + " logits"


# In a process of its own


def work(tree: str, machine: str) -> None:
    """Reads runs from standard input and writes their results to standard output, as JSON."""
    import machines

    machines.make_machine(machine)
    import lowtide

    if not Path(lowtide.__file__).is_relative_to(tree):
        raise RuntimeError(f"{lowtide.__file__} is not of {tree}")
    print(json.dumps([_result(run) for run in json.load(sys.stdin)]))


def _result(run: Run) -> Result:
    from lowtide.errors import PlanError, UnsupportedError, UsageError

    try:
        return _answer(run)
    except (PlanError, UnsupportedError, UsageError) as error:
        return {"refused": type(error).__name__}
    except Exception as error:  # said with the run's settings, beside what the other tree does
        return {"failed": f"{type(error).__name__}: {error}"}


def _answer(run: Run) -> Result:
    from lowtide.llm import LLM, plan_model

    options = {"context": _CONTEXT, "offline": True, **run["options"]}
    plan = plan_model(run["model"], **options)
    budget = plan.minimum_bytes + int(run["share"] * (plan.full_bytes - plan.minimum_bytes))
    tier = "host_memory" if plan.gpu is None else "gpu_memory"
    with LLM(run["model"], **options, **{tier: budget}) as llm:
        ids = [answer.token_ids for answer in llm.generate(run["prompts"], **run["params"])]
        logits = llm.logits(run["prompts"][0]).numpy().tobytes()
    return {"ids": ids, "logits": hashlib.sha256(logits).hexdigest()}


if __name__ == "__main__":
    sys.exit(main())
