"""`make bench`: what it would run, for how long; nothing is measured here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from whole import LIMIT_S, wait_until

from lowtide.errors import UsageError

bench = import_module("bench")


def test_all_that_is_run_fits_into_its_time() -> None:
    assert sum(script.minutes for script in bench.SMALL) <= bench.MAX_MINUTES
    assert sum(script.minutes for script in bench.LARGE) <= bench.MAX_LARGE_MINUTES
    assert all(script.disk_GiB <= 5 for script in bench.SMALL)
    assert all(script.minutes > 0 for script in (*bench.SMALL, *bench.LARGE))


@pytest.mark.parametrize("script", [*bench.SMALL, *bench.LARGE], ids=lambda one: one.name)
def test_scripts_take_what_they_are_called_with(
    script: bench.Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script.name, *script.arguments, "--out", "lines.jsonl"])
    options = import_module(script.name)._options()
    assert options.out == Path("lines.jsonl")


def test_scripts_are_chosen_by_name() -> None:
    assert bench.chosen(None, is_large=False) == bench.SMALL
    assert bench.chosen(None, is_large=True) == bench.LARGE
    # Two calls of one script; one that both kinds have; one that only the other kind has.
    simulations = bench.chosen(["simulate"], is_large=False)
    assert [one.name for one in simulations] == ["simulate", "simulate"]
    [short], [whole] = (bench.chosen(["absent"], is_large=large) for large in (False, True))
    assert short in bench.SMALL and whole in bench.LARGE and short.cut and not whole.cut
    assert bench.chosen(["full_size"], is_large=False)[0] in bench.LARGE
    with pytest.raises(UsageError, match="No script speed; there are .*decode"):
        bench.chosen(["speed"], is_large=False)


def test_what_a_large_script_makes_is_deleted_after_it(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for is_wanted in (False, True):
        with bench.forgotten(models, is_wanted):
            (models / f"{is_wanted}").mkdir()
            (models / f"{is_wanted}" / "config.json").touch()
            (models / f"{is_wanted}.trace").touch()
    assert sorted(path.name for path in models.iterdir()) == ["False", "False.trace"]


def test_a_script_that_fails_keeps_no_other_from_running_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "bad.py").write_text("raise SystemExit(3)")
    (folder / "good.py").write_text(
        "import sys\nopen(sys.argv[sys.argv.index('--out') + 1], 'a').write('{}\\n')"
    )
    scripts = (
        bench.Script("bad", 1),
        bench.Script("huge", 1, disk_GiB=1 << 40),
        bench.Script("good", 1, ("--short",)),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    monkeypatch.setattr(bench, "SMALL", scripts)
    monkeypatch.setattr(bench, "commit", lambda: "0123456789ab")
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", str(tmp_path)])
    with pytest.raises(UsageError, match="Failed: bad, huge; the others' lines are in"):
        bench.main()
    assert [path.name[11:] for path in tmp_path.glob("*.jsonl")] == ["good.jsonl"]
    told = capfd.readouterr()
    for words in (r"bad: \d\.\d minutes, exit status 3\.", "huge: needs", r"good: \d\.\d minutes"):
        assert re.search(words, told.out + told.err)


def test_a_script_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(600)"
    file = tmp_path / "child"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, {str(file)!r}])"
    )
    wait = subprocess.Popen.wait

    def wait_for_the_child(process: subprocess.Popen[bytes], limit_s: float | None = None) -> int:
        wait_until(lambda: file.exists() and file.read_text() != "")
        return wait(process, limit_s)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", wait_for_the_child)
        assert bench.run_status([sys.executable, "-c", parent], 0.1) is None
    wait_until(lambda: has_ended(int(file.read_text())))
    assert bench.run_status([sys.executable, "-c", "raise SystemExit(3)"], 60.0) == 3


@pytest.mark.parametrize("is_deaf", [False, True], ids=["listens", "does not"])
def test_a_bench_that_is_ended_ends_its_script_and_deletes_its_model(
    tmp_path: Path, is_deaf: bool
) -> None:
    """As `kill` ends it: its script has a temporary model, and has made one in the cache."""
    (tmp_path / "benchmarks").mkdir()
    models = tmp_path / "cache" / "lowtide" / "benchmarks"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if is_deaf else "pass"
    (tmp_path / "benchmarks" / "long.py").write_text(f"""
import os, signal, tempfile, time
from pathlib import Path
from common.arguments import run_script
def main():
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}, prefix="model-"):
        {deaf}
        Path({str(models)!r}, "made").mkdir()
        Path({str(tmp_path)!r}, "started").write_text(str(os.getpid()))
        time.sleep(600)
run_script(main)
""")
    program = f"""
import sys
import bench
from common.arguments import run_script
from pathlib import Path
bench.LARGE = (bench.Script("long", 1),)
bench.REPOSITORY, bench.CLEARING_S = Path({str(tmp_path)!r}), {1 if is_deaf else LIMIT_S}
bench.commit = lambda: "0123456789ab"
sys.argv = ["bench.py", "--large", "--out", {str(tmp_path)!r}]
run_script(bench.main)
"""
    paths = [str(Path(bench.__file__).parent), *sys.path]
    surroundings = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    started = tmp_path / "started"
    with subprocess.Popen([sys.executable, "-c", program], env=surroundings) as process:
        wait_until(lambda: started.exists() and started.read_text() != "")
        process.terminate()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    wait_until(lambda: has_ended(int(started.read_text())))
    assert not list(models.iterdir())
    assert is_deaf or not list(tmp_path.glob("model-*"))


def has_ended(number: int) -> bool:
    status = Path(f"/proc/{number}/stat")
    try:
        return status.read_text().split()[2] == "Z"
    except OSError:
        return True


def test_files_of_no_commit_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    monkeypatch.setattr(bench, "commit", lambda: "0123456789ab+")
    monkeypatch.delattr(bench, "run_status")  # by which scripts are run
    with pytest.raises(UsageError, match="could not be repeated"):
        bench.main()
