"""Runs the tests of what no machine may change as other machines would: `make test-machines`.

Float32 products are MKL's and bfloat16 products oneDNN's; both choose their code by the processor,
and their bits with it. Both can be told to take an older processor's, which is a different machine
to the tests marked `invariant`. More than this processor has they ignore. Other machines have no
compiler, no direct reads or no huge pages (`tests/machines.py`).

    python tools/test_machines.py --jobs 2              # all of them, two at a time
    python tools/test_machines.py mkl-avx512 openmp-1   # those named
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_LIMIT_S = 900.0

_MACHINE = "LOWTIDE_TEST_MACHINE"
MACHINES: Mapping[str, Mapping[str, str]] = {
    "as-it-is": {},
    "mkl-avx2-strict": {"MKL_CBWR": "AVX2,STRICT"},
    "mkl-avx512": {"MKL_CBWR": "AVX512"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "onednn-avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "openmp-1": {"OMP_NUM_THREADS": "1"},
    "openmp-2": {"OMP_NUM_THREADS": "2"},
    "no-compiler": {_MACHINE: "no-compiler"},
    "reference-kernels": {_MACHINE: "reference-kernels"},
    "kernels-avx512-bf16": {_MACHINE: "kernels-avx512-bf16"},
    "kernels-avx512": {_MACHINE: "kernels-avx512"},
    "kernels-avx2": {_MACHINE: "kernels-avx2"},
    "kernels-portable": {_MACHINE: "kernels-portable"},
    "no-direct-reads": {_MACHINE: "no-direct-reads"},
    "no-huge-pages": {_MACHINE: "no-huge-pages"},
    # SSE4.2's float32 products differ between one and several threads from 4 rows up.
    "many-cores": {_MACHINE: "many-cores", "MKL_CBWR": "SSE4_2"},
}
"""Environments of the machines; other variables that decide the same are taken out."""

_VARIABLES = {name for environment in MACHINES.values() for name in environment}


def main() -> int:
    """Prints a line for each machine as it ends; 1 when any test failed."""
    parser = argparse.ArgumentParser(description="The invariant tests as on other machines.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MACHINES))
    parser.add_argument("--jobs", type=int, default=1, help="machines at once")
    options = parser.parse_args()
    names = options.names or list(MACHINES)
    unknown = sorted(set(names) - MACHINES.keys())
    if unknown:
        parser.error(f"no such machine: {', '.join(unknown)}")
    with ThreadPoolExecutor(options.jobs) as jobs:
        passed = list(jobs.map(_passes, names))
    failed = [name for name, is_good in zip(names, passed, strict=True) if not is_good]
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return 1 if failed else 0


def _passes(name: str) -> bool:
    environment = {key: text for key, text in os.environ.items() if key not in _VARIABLES}
    environment |= {"HYPOTHESIS_PROFILE": "quick", **MACHINES[name]}
    # `-p no:cacheprovider`: two at once would write the same files.
    options = ["-q", "-m", "invariant", "--no-header", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *_files()]
    start_s = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S
        )
        passed, output = done.returncode == 0, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        passed, output = False, f"not done within {_LIMIT_S:g} s\n{error.stdout!r}"
    seconds = time.perf_counter() - start_s
    last = output.strip().rpartition("\n")[2]
    print(f"{name:18} {'ok' if passed else 'FAILED':6} {seconds:5.0f} s  {last}", flush=True)
    if not passed:
        print(output, flush=True)
    return passed


def _files() -> list[str]:
    """List the files with invariance tests: collecting from all would take a third of the time."""
    files = sorted((_ROOT / "tests").glob("test_*.py"))
    return [str(path) for path in files if "pytest.mark.invariant" in path.read_text()]


if __name__ == "__main__":
    sys.exit(main())
