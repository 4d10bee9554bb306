"""Runs the compiled kernels under sanitizers: `make sanitize`.

`tests/cpp/` calls them without Python over sizes that are odd, nothing and all. Address, undefined
behaviour and threads are looked at by three builds of libraries and driver; one that this compiler
does not have is named and left out.

    python tools/sanitize.py              # all three
    python tools/sanitize.py thread       # those named
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lowtide.errors import UnsupportedError
from lowtide.kernels.cpu.compiler import find_compiler
from lowtide.kernels.cpu.sources import KERNELS_FOLDER, all_parts, part

_DRIVER = Path(__file__).parent.parent / "tests" / "cpp"
_LIMIT_S = 1800.0  # of the slowest, on a busy machine
_SOURCES = [path for name in all_parts() for path in part(name).sources]

SANITIZERS: Mapping[str, Mapping[str, str]] = {
    # Leaks are not looked for: that stops all threads, and now and then fails where a team sleeps.
    "address": {"ASAN_OPTIONS": "detect_stack_use_after_return=1:detect_leaks=0"},
    "undefined": {"UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"},
}
"""Environments of the sanitizers' programs."""

_FLAGS = (
    *("-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread", "-fno-omit-frame-pointer"),
    f"-I{KERNELS_FOLDER}",
)


def main() -> int:
    """Prints a line for each sanitizer as it ends; 1 when one found something."""
    parser = argparse.ArgumentParser(description="The compiled kernels under sanitizers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SANITIZERS))
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once")
    options = parser.parse_args()
    names = options.names or list(SANITIZERS)
    unknown = sorted(set(names) - SANITIZERS.keys())
    if unknown:
        parser.error(f"no such sanitizer: {', '.join(unknown)}")
    try:
        compiler = find_compiler()
    except UnsupportedError as error:
        print(f"nothing is looked at: {error}")
        return 0
    with tempfile.TemporaryDirectory(prefix="lowtide-sanitize-") as folder:
        results = [_passes(name, compiler, Path(folder), options.jobs) for name in names]
    return 0 if all(results) else 1


def build_driver(compiler: str, path: Path, flags: Sequence[str] = ()) -> None:
    """Compiles the driver; raises CalledProcessError with the compiler's words."""
    sources = sorted(map(str, _DRIVER.glob("*.cpp")))
    _run([compiler, *_FLAGS, *flags, *sources, "-o", str(path), "-ldl"])


def _passes(name: str, compiler: str, folder: Path, num_jobs: int) -> bool:
    start_s = time.perf_counter()
    if not _is_there(name, compiler, folder):
        print(f"{name:10} missing: {compiler} has none that runs here", flush=True)
        return True
    flags = (f"-fsanitize={name}", f"-fno-sanitize-recover={name}")
    objects = [str(folder / f"{name}-{number}.o") for number in range(len(_SOURCES))]
    library = str(folder / f"{name}.so")

    def build(number: int) -> None:
        if number == len(_SOURCES):
            build_driver(compiler, folder / name, flags)
            return
        source = str(_SOURCES[number])
        _run([compiler, *_FLAGS, *flags, "-fPIC", "-c", source, "-o", objects[number]])

    try:
        with ThreadPoolExecutor(num_jobs) as jobs:
            list(jobs.map(build, range(len(_SOURCES) + 1)))
        _run([compiler, *_FLAGS, *flags, "-shared", *objects, "-o", library])
        output = _run([str(folder / name), library], SANITIZERS[name])
        verdict, is_good = output.strip().rpartition("\n")[2], True
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        verdict, is_good = f"{error}\n{error.output}", False
    seconds = time.perf_counter() - start_s
    print(f"{name:10} {'ok' if is_good else 'FAILED':6} {seconds:4.0f} s  {verdict}", flush=True)
    return is_good


def _is_there(name: str, compiler: str, folder: Path) -> bool:
    """Return True if a program built with the sanitizer runs.

    Its library may be missing, or the kernel refuse it.
    """
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() { return 0; }\n")
    try:
        _run([compiler, f"-fsanitize={name}", str(source), "-o", str(program)])
        _run([str(program)])
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command; return its output, standard error included."""
    done = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_LIMIT_S,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
