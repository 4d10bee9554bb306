"""Set before anything of lowtide is imported: how property tests, Triton and torch run."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from machines import make_machine
from parts import HAS_MODELS, PARTS, ROOMS, can_run, is_of_room, part_of

if TYPE_CHECKING:
    from hub_stand_in import StandIn

try:
    import hypothesis
except ImportError:  # a bare machine with a GPU, whose tests need none
    pass
else:
    from examples import NORMAL_EXAMPLES

    # A busy machine is no failure.
    untimed = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    repeated = {**untimed, "derandomize": True, "database": None}
    num_of_ci = NORMAL_EXAMPLES * 3 // 5
    hypothesis.settings.register_profile("ci", **repeated, max_examples=num_of_ci)
    hypothesis.settings.register_profile("quick", **repeated, max_examples=10)
    hypothesis.settings.register_profile("deep", **untimed, max_examples=2000)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


# What is imported and collected stays. To look through it for garbage again and again took a third
# of collecting, and a twentieth of the tests' time.
gc.disable()


def pytest_collection_finish() -> None:
    from lowtide.hardware import core_speed

    # Measured at each opening to steer decisions: shorter and over less memory, it steers as well,
    # for no test asks how true it is.
    core_speed.MEASURE_S, core_speed.COLD_BYTES = 0.01, 1 << 20
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=["product", *PARTS], help="only this part of the tests")
    parser.addoption("--room", choices=ROOMS, help="only tests of this room of the package")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.match("test_*.py"):
        return None
    part, room = config.getoption("--part"), config.getoption("--room")
    is_of_part = part is None or part_of(collection_path) == part
    is_of_room_asked = room is None or is_of_room(collection_path, room)
    return None if is_of_part and is_of_room_asked and can_run(collection_path) else True


def pytest_report_header() -> str | None:
    return None if HAS_MODELS else "without tests/goldens: tests of recorded models are left out"


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton kernels run in its interpreter, which is chosen at import.

    LOWTIDE_TEST_MACHINE: what this machine is to lack, see `machines.py`.
    """
    for allowed in make_machine(os.environ.get("LOWTIDE_TEST_MACHINE", "")):
        config.addinivalue_line("filterwarnings", allowed)
    expression = str(config.getoption("-m"))
    wants_gpu = "gpu" in expression.replace("not gpu", "")
    if not wants_gpu:
        os.environ["TRITON_INTERPRET"] = "1"


def _load_kernels() -> None:
    """All parts, else the first test with a cache of its own compiles what it needs."""
    from lowtide.errors import StorageError, UnsupportedError
    from lowtide.kernels.cpu.library import load_parts
    from lowtide.kernels.cpu.sources import all_parts

    # Where nothing can be compiled or kept, each test has its own way to say so.
    with suppress(StorageError, UnsupportedError):
        load_parts(all_parts())


def _measure_no_models() -> None:
    """Loads measure nothing and no run is kept: tests of that put it back."""
    with suppress(ImportError):  # a bare machine with a GPU
        from lowtide.answers import loaded

        patch = pytest.MonkeyPatch()
        patch.setattr(loaded, "with_prediction", lambda engine, opened, ask: engine)


def pytest_sessionstart() -> None:
    """Matrices of tests are small: more threads of torch would only wait for each other.

    Some containers have a GPU multiply float32 in TF32, which no tolerance here is made for.
    """
    import torch

    _load_kernels()
    _measure_no_models()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    # A shell has what it runs in the background ignore Ctrl-C, and so would programs under test.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub on this machine, with an empty cache in `tmp_path / "cache"`."""
    from hub_stand_in import served

    with served(tmp_path / "cache", monkeypatch) as hub:
        yield hub


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of a GPU run where there is one and they are asked for by name: `-m gpu`."""
    import torch

    if item.get_closest_marker("gpu") is not None:
        if "TRITON_INTERPRET" in os.environ or not torch.cuda.is_available():
            pytest.skip("needs a GPU and -m gpu")
