"""Writes what README.md and docs/ say of measurements from the lines of docs/results/.

A part of a page between `<!-- measured: NAME -->` and `<!-- end of measured -->` is rewritten; the
blocks are in `reporting/blocks.py`, which names the pictures that are drawn, too. Lines that
were measured on files of no commit are refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.arguments import run_script
from reporting.ages import aged
from reporting.blocks import PAGES, PICTURES, blocks
from reporting.pages import rewritten
from reporting.results import Results, ResultsError

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    options = _options()
    results = Results.load(Path("docs/results"), REPOSITORY)
    if options.age:
        print("\n".join(aged(REPOSITORY, results)) or "All results are of today's code.")
        return
    changed = [page for page in PAGES if _report(page, results, options.check)]
    changed += [path for path in PICTURES if _draw(path, results, options.check)]
    if options.check and changed:
        names = ", ".join(map(str, changed))
        raise ResultsError(f"{names}: not what the results say; run `make report`.")
    print(f"Rewritten: {', '.join(map(str, changed)) or 'nothing, all pages are so already'}.")


def _report(page: Path, results: Results, is_check: bool) -> bool:
    """Return True if the page was out of date; write it unless this only checks."""
    path = REPOSITORY / page
    text = path.read_text(encoding="utf-8")
    new = rewritten(text, blocks(results, page))
    if new != text and not is_check:
        path.write_text(new, encoding="utf-8")
    return new != text


def _draw(path: Path, results: Results, is_check: bool) -> bool:
    """Return True if the picture was out of date.

    Writes it, where there is one, unless this only checks.
    """
    picture, file = PICTURES[path](results), REPOSITORY / path
    old = file.read_text(encoding="utf-8") if file.exists() else None
    if picture is not None and picture != old and not is_check:
        file.write_text(picture, encoding="utf-8")
    return picture is not None and picture != old


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it would")
    parser.add_argument("--age", action="store_true", help="list results older than their code")
    return parser.parse_args(sys.argv[1:])


if __name__ == "__main__":
    run_script(main)
