"""Makes what is published, in dist/: `make wheel`.

    dist/lowtide-*.tar.gz                          the sources
    dist/lowtide-*-manylinux_2_28_MACHINE.whl      for machines like this one
    dist/elsewhere/lowtide-*.whl                   for other processors, and without kernels

Every wheel is made from the sources unpacked anew. auditwheel says which systems
they run on; one that needs a newer system, or is too large, ends this with an error.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_DIST = _ROOT / "dist"

GLIBC = "2_28"
MACHINES = ("x86_64", "aarch64")
PLATFORMS = (*(f"manylinux_{GLIBC}_{machine}" for machine in MACHINES), "any")

MOST_WHEEL_BYTES = 16 * 10**6
MOST_SDIST_BYTES = 20 * 10**6

_VERDICT = re.compile(
    r'consistent\s+with\s+the\s+following\s+platform\s+tag:\s+"(\w+?)_(\d+)_(\d+)_'
)


def main() -> int:
    """Prints a line for each file; 1 when one is not as it should be."""
    for old in _DIST.glob("**/lowtide-*"):
        old.unlink()
    [sdist] = _build(_ROOT, _DIST, "--sdist")
    print(_line(sdist), flush=True)
    faults = _too_large(sdist, MOST_SDIST_BYTES)
    for name in PLATFORMS:
        is_own = name == f"manylinux_{GLIBC}_{platform.machine()}"
        with tempfile.TemporaryDirectory(prefix="lowtide-wheel-") as folder:
            with tarfile.open(sdist) as archive:
                archive.extractall(folder, filter="data")
            [sources] = Path(folder).iterdir()
            option = f"-C--build-option=--plat-name={name}"
            target = _DIST if is_own else _DIST / "elsewhere"
            [wheel] = _build(sources, target, "--wheel", option, made=f"*-{name}.whl")
        print(_line(wheel), flush=True)
        faults += _too_large(wheel, MOST_WHEEL_BYTES)
        if name != "any":
            faults += _too_new(wheel)
    for fault in faults:
        print(f"wrong: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _build(sources: Path, target: Path, *options: str, made: str = "*.tar.gz") -> list[Path]:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), *options]
    done = subprocess.run(
        [*command, str(sources)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nThis cannot be built: {' '.join(command)}")
    return list(target.glob(made))


def _line(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:6.1f} MB  {path.relative_to(_ROOT)}"


def _too_large(path: Path, most_bytes: int) -> list[str]:
    if path.stat().st_size <= most_bytes:
        return []
    return [f"{path.name} has {path.stat().st_size} bytes, and at most {most_bytes} are wanted"]


def _too_new(wheel: Path) -> list[str]:
    """Return a fault if a wheel needs a newer system than its name says; print auditwheel's tag."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = _VERDICT.search(done.stdout)
    if found is None:
        return [f"auditwheel says of {wheel.name}: {done.stdout.strip()}"]
    kind, *glibc = found.groups()
    print(f"           runs on {kind}_{glibc[0]}_{glibc[1]} and newer, says auditwheel", flush=True)
    wanted = tuple(map(int, GLIBC.split("_")))
    if kind == "manylinux" and tuple(map(int, glibc)) <= wanted:
        return []
    return [f"{wheel.name} needs {'_'.join(found.groups())}"]


if __name__ == "__main__":
    sys.exit(main())
