"""Tries the wheels of dist/ as their users have them: `make test-wheel`.

In a fresh environment without a compiler lowtide writes an answer and compiles nothing; then
`lowtide.kernels.check` runs there on this processor, and under QEMU (user mode) on older ones and
on ARM, with Debian's Python for it. A variant's digest has to be the same everywhere. What QEMU or
Debian's packages are missing for is left out, with a word.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_DIST = Path(__file__).parents[1] / "dist"
_LIMIT_S = 900.0

_OLDER = {"Nehalem": 1, "Haswell": 2}
"""QEMU's processors, and how many variants of the kernels they run."""

_CHECK = ("-m", "lowtide.kernels.check")
_DIGEST = re.compile(r"^(.+?) +([0-9a-f]{16})$", re.MULTILINE)

Digests = Mapping[str, str]


def main() -> int:
    """Prints what was run; ends with an error at the first fault."""
    machine = platform.machine()
    with tempfile.TemporaryDirectory(prefix="lowtide-wheels-") as name:
        folder = Path(name)
        fresh = _fresh_environment(folder / "fresh", _wheel(f"*-manylinux_*_{machine}.whl"))
        _writes_without_compiler(fresh, folder / "home")
        own = _checked("this processor", [str(fresh), *_CHECK], folder / "home")
        if machine == "x86_64" and (qemu := _found("qemu-x86_64")):
            for processor, num_variants in _OLDER.items():
                command = [qemu, "-cpu", processor, str(fresh), *_CHECK]
                digests = _checked(processor, command, folder / "home")
                _compare(processor, digests, own)
                found = sum(not title.startswith("int8 rows") for title in digests)
                if found != num_variants:
                    raise SystemExit(f"{processor} runs {found} variants, not {num_variants}")
        if qemu := _found("qemu-aarch64"):
            _on_arm(qemu, folder / "arm", folder / "home", own)
    return 0


def _found(program: str) -> str | None:
    path = shutil.which(program) or shutil.which(f"{program}-static")
    if path is None:
        print(f"left out: there is no {program} (Debian: apt install qemu-user)", flush=True)
    return path


def _wheel(pattern: str) -> Path:
    wheels = [*_DIST.glob(pattern), *_DIST.glob(f"elsewhere/{pattern}")]
    if len(wheels) != 1:
        raise SystemExit(f"dist/ has {len(wheels)} wheels {pattern}: make wheel")
    return wheels[0]


def _fresh_environment(folder: Path, wheel: Path) -> Path:
    """Install a wheel into an environment that has this one's packages beside it.

    Return the environment's Python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    [packages] = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in others))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    print(f"installed {wheel.name}", flush=True)
    return python


def _environment(home: Path) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    return {"HOME": str(home), "PATH": "", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


def _writes_without_compiler(python: Path, home: Path) -> None:
    lowtide = str(python.with_name("lowtide"))
    command = [lowtide, "generate", "demo:autoregressive", "Roman 148", "--quiet"]
    answer = _run(command, _environment(home)).strip()
    kept = list(home.glob(".cache/lowtide/kernels/*"))
    if answer != "CXLVIII" or kept:
        raise SystemExit(f"it wrote {answer!r}, and compiled {len(kept)} files")
    print(f"Roman 148: {answer}; nothing was compiled", flush=True)


def _checked(title: str, command: Sequence[str], home: Path, **variables: str) -> Digests:
    output = _run(command, {**_environment(home), **variables})
    print(f"--- {title}\n{output.strip()}", flush=True)
    if list(home.glob(".cache/lowtide/kernels/*")):
        raise SystemExit(f"{title}: the wheel's kernels were not used")
    return dict(_DIGEST.findall(output))


def _compare(title: str, digests: Digests, own: Digests) -> None:
    other = [name for name, digest in digests.items() if own.get(name, digest) != digest]
    if other or not digests:
        raise SystemExit(f"{title} computes otherwise in {', '.join(other) or 'all'}")


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S
    )
    if done.returncode:
        shown = " ".join(map(str, command))
        raise SystemExit(f"{shown} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


# ARM


def _on_arm(qemu: str, folder: Path, home: Path, own: Digests) -> None:
    """Check the wheel for ARM by Debian's Python for it."""
    root = _debian(folder, "arm64")
    if root is None:
        print("left out: ARM, whose Python apt-get cannot fetch", flush=True)
        return
    with zipfile.ZipFile(_wheel("*-manylinux_*_aarch64.whl")) as archive:
        archive.extractall(folder / "wheel")
    python = str((root / "usr/bin/python3").resolve())
    command = [qemu, "-L", str(root), python, *_CHECK]
    digests = _checked("aarch64", command, home, PYTHONPATH=str(folder / "wheel"))
    _compare("aarch64", digests, own)


def _debian(folder: Path, architecture: str) -> Path | None:
    """Unpack Debian's Python of another architecture; this system's packages stay as they are."""
    state = folder / "state"
    for each in ("lists/partial", "cache/archives/partial"):
        (state / each).mkdir(parents=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "",
        "Dir::State": str(state),
        "Dir::State::status": str(state / "status"),
        "Dir::Cache": str(state / "cache"),
        "Debug::NoLocking": "1",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    fetch = [*apt, "install", "--yes", "--download-only", "--no-install-recommends", "python3"]
    try:
        for command in ([*apt, "update"], fetch):
            subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    root = folder / "root"
    for package in state.glob("cache/archives/*.deb"):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)
    return root


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
