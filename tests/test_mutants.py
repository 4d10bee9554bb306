"""Faults on purpose: drawn ones change one line of one function, whatever file it is in."""

import ast
import subprocess
import sys
from pathlib import Path

MUTANTS = Path(__file__).parent.parent / "tools" / "mutants.py"

DRAWN = """
import sys
sys.path.insert(0, sys.argv[1])
import mutants
places = mutants._lines(mutants.ROOT)
for fault in mutants._drawn(40, seed=3):
    [(path, number)] = places[fault.within, fault.line]
    print([fault.within, fault.line, fault.changed, str(path), number])
"""


def test_a_drawn_fault_is_one_line_of_one_function() -> None:
    command = [sys.executable, "-c", DRAWN, str(MUTANTS.parent)]
    drawn = [
        ast.literal_eval(line) for line in subprocess.check_output(command, text=True).splitlines()
    ]
    assert len({tuple(one[:2]) for one in drawn}) == 40
    for within, line, changed, path, number in drawn:
        assert line != changed
        assert Path(path).read_text().splitlines()[number].strip() == line
        assert bool(within) == path.endswith(".py")
