"""Runs other programs' own test suites against lowtide.

pip install transformers && python tools/peer_suites.py calls|grammars|templates|vocabularies FOLDER

FOLDER is the unpacked sdist of llama-cpp-python, which has llama.cpp's tests, templates and
vocabularies (`pip download --no-binary :all: --no-deps llama-cpp-python`). Ends with 1 where a
difference is found that no table of known ones names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peer_calls
import peer_grammars
import peer_templates
import peer_vocabularies

SUITES = {
    "calls": peer_calls.run,
    "grammars": peer_grammars.run,
    "templates": peer_templates.run,
    "vocabularies": peer_vocabularies.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    llama = given.folder / "vendor" / "llama.cpp"
    if not llama.is_dir():
        raise SystemExit(f"{given.folder} has no vendor/llama.cpp: it is no such sdist.")
    raise SystemExit(SUITES[given.suite](llama))


if __name__ == "__main__":
    main()
