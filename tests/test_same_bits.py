"""`tools/same_bits.py`: nothing differs from itself, and a difference is found and told."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import same_bits

ROOT = Path(__file__).parent.parent
_OTHER_LOGITS = """
_logits = LLM.logits
LLM.logits = lambda llm, token_ids: _logits(llm, token_ids) * 1.0000001
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[same_bits.Run]:
    models = same_bits.make_models(tmp_path_factory.mktemp("models"))
    drawn = same_bits.draw(models, 3 * len(models), 1)
    assert {run["machine"] for run in drawn} == set(same_bits.MACHINES)
    return [run for run in drawn if run["machine"] in ("", "reference-kernels")][:8]


@pytest.mark.slow
def test_a_tree_has_the_bits_of_itself(runs: list[same_bits.Run]) -> None:
    num_refused, different = same_bits.compare((ROOT, ROOT), runs)
    assert different == [] and num_refused == 0


def test_what_differs_is_named_with_its_settings(runs: list[same_bits.Run], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "machines.py", tmp_path / "tests")
    with (tmp_path / "src" / "lowtide" / "llm.py").open("a") as file:
        file.write(_OTHER_LOGITS)
    run = next(run for run in runs if not run["machine"])
    num_refused, different = same_bits.compare((tmp_path, ROOT), [run])
    assert num_refused == 0 and len(different) == 1
    settings, difference = different[0].splitlines()
    assert Path(run["model"]).name in settings and "max_tokens" in settings
    assert difference.strip() == "other logits, the same ids"
