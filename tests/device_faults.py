"""Faults of a whole model's reads, copies and host work, as its transfer or its device has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import pytest
from inside import engine_of

from lowtide import LLM
from lowtide.devices.kind import KINDS, DeviceRequest, OpenDevice
from lowtide.errors import DeviceError, StorageError
from lowtide.threads.executor import Work


@contextmanager
def failing_reads(llm: LLM) -> Iterator[None]:
    """Every read of an expert fails, as on a disk with a bad sector."""

    def start(layer: int, expert: int, slot: int) -> Future[int]:
        ticket = Future[int]()
        ticket.set_exception(StorageError("no such sector"))
        return ticket

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_of(llm).experts.host.transfer, "start", start)
        yield


@contextmanager
def failing_copies(llm: LLM) -> Iterator[None]:
    """Every copy to the device fails: it is given less than a slot holds."""
    device = engine_of(llm).experts.device.device
    copy = device.copy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "copy", lambda source, *where: copy(source[:5], *where))
        yield


class Failed:
    """An event of work that has failed."""

    def is_done(self) -> bool:
        return True

    def wait(self, limit_s: float = 0.0) -> None:
        raise DeviceError("on purpose")


@contextmanager
def failing_runs(llm: LLM) -> Iterator[None]:
    """Every run on the device fails: it waits for what has failed."""
    device = engine_of(llm).experts.device.device
    run = device.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "run", lambda *given: run(*given[:3], Failed()))
        yield


class HostWork:
    """The host's share beside devices; `before`, if set, is called first, on the same thread."""

    before: Callable[[], object] | None = None


@contextmanager
def host_work_spoiled() -> Iterator[HostWork]:
    """Emulated devices that are opened inside hand out host work that can be spoiled."""
    spoiled, emulated = HostWork(), KINDS["emulated"]

    def open_device(request: DeviceRequest) -> OpenDevice:
        made = emulated.open(request)
        host_work = made.device.host_work

        def spoil(num_tokens: Sequence[int], work: Work) -> Work:
            def begin() -> None:
                if spoiled.before is not None:
                    spoiled.before()
                work()

            return host_work(num_tokens, begin)

        made.device.host_work = spoil
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "emulated", replace(emulated, open=open_device))
        yield spoiled
