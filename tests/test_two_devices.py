"""Two emulated devices: the same words and bits, both at work, and either may fail."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_cuda_device import HostExperts
from test_cuda_device import make_device as make_cuda_device
from test_emulated import LAYOUT, group, make_experts, make_layer, spans_of, speeds
from test_hybrid import FAST, Case, one_by_one, presets, refuse, shares, tier_of

from lowtide.devices.emulated import COMPUTE, LINK, EmulatedDevice, Span
from lowtide.devices.emulated_speeds import num_emulated_devices
from lowtide.devices.group import DeviceGroup
from lowtide.engine import device as device_engine
from lowtide.errors import DeviceError, PlanError, UnsupportedError, UsageError
from lowtide.experts.device import Device
from lowtide.experts.slots import slots_per_device
from lowtide.kernels.reference import Kernels
from lowtide.llm import LLM
from lowtide.memory.arena import Arena
from lowtide.policies.presets import fetches_all, preset_names
from lowtide.threads.stream import ThreadEvent

TWO = {**FAST, "devices": "2"}


@pytest.fixture(scope="module", params=["llada2", "qwen3_moe"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("two") / "model")


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llada2", tmp_path_factory.mktemp("two") / "model")


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith((COMPUTE, LINK))]


def devices_of(llm: LLM) -> list[EmulatedDevice]:
    device = tier_of(llm).device
    assert isinstance(device, DeviceGroup)
    assert all(isinstance(one, EmulatedDevice) for one in device.devices)
    return list(device.devices)  # type: ignore[arg-type]


def spans_by_device(devices: Sequence[Device], stream: str) -> list[list[Span]]:
    """What each of two devices noted of a stream."""
    first, second = devices
    assert isinstance(first, EmulatedDevice) and isinstance(second, EmulatedDevice)
    return [spans_of(first, stream), spans_of(second, f"{stream}-2")]


@examples(6)
@given(policy=presets, gpu_share=shares, home_share=shares, num_devices=st.sampled_from([2, 2, 3]))
def test_no_preset_or_budget_changes_a_bit(
    case: Case, policy: str, gpu_share: float, home_share: float, num_devices: int
) -> None:
    options = {**FAST, "devices": str(num_devices)}
    try:
        llm = case.open(policy, gpu_share, home_share, device_options=options)
    except PlanError as error:
        assert fetches_all(policy) and "1 expert slot" in str(error)
        return
    with llm:
        case.check(llm)
        case.check(llm)


@pytest.mark.parametrize("policy", sorted(set(preset_names()) - {"resident"}))
def test_both_devices_have_a_part_of_every_presets_work(diffusion: Case, policy: str) -> None:
    with diffusion.open(policy, 0.4, device_options=TWO) as llm:
        devices = devices_of(llm)
        for device in devices:
            device.timeline = []
        diffusion.check(llm)
        runs, copies = (
            [len(spans) for spans in spans_by_device(devices, stream)] for stream in (COMPUTE, LINK)
        )
    assert (min(runs) > 0) == (policy != "all-host")
    if sum(copies) >= 20:
        assert min(copies) > 0.3 * sum(copies)


def test_everything_resident_is_divided_evenly(diffusion: Case) -> None:
    with diffusion.open("resident", 1.0, device_options=TWO) as llm:
        ledger, shape = tier_of(llm).link.ledger, llm.config.moe_shape
        for layer in range(shape.num_layers):
            devices = ledger.devices_with(layer, np.arange(shape.num_experts))
            assert abs(np.count_nonzero(devices) * 2 - shape.num_experts) <= 2
        diffusion.check(llm)


def make_group(link_s: float = 0.0) -> DeviceGroup:
    devices = []
    for number, num_slots in enumerate(slots_per_device(3, 2), 1):
        arena = Arena(num_slots * LAYOUT.num_bytes)
        devices.append(EmulatedDevice(arena, LAYOUT, num_slots, speeds(link_s), number=number))
        devices[-1].timeline = []
    return DeviceGroup(devices)


def test_it_is_a_device_with_the_slots_of_all() -> None:
    with closing(make_group()) as made:
        device: Device = made
        assert (device.name, device.torch_device) == ("emulated", torch.device("cpu"))
        assert device.num_slots == 3
        assert device.describe().startswith("2 devices, each emulated: link ")
        assert slots_per_device(7, 3) == [3, 2, 2]


def test_two_links_copy_at_once_and_each_in_order() -> None:
    experts, layer = make_experts(), make_layer()
    with closing(make_group(link_s=0.05)) as device:
        events = [device.copy(experts.image(e), slot, None) for e, slot in enumerate((0, 2, 1))]
        device.run(group({1: 2}), *layer, events[1]).wait()
        device.run(group({0: 0, 2: 1}), *layer, events[2])
        device.join()
        first, second = spans_by_device(device.devices, LINK)
    assert [span.name for span in (*first, *second)] == ["copy 0", "copy 1", "copy 0"]
    assert second[0].start_s < first[0].end_s <= first[1].start_s


# Faults: a typed error that says which device, and the engine goes on as if nothing had been


@pytest.mark.parametrize("policy", ["lru", "lowtide", "dali"])
def test_a_failing_copy_to_the_second(
    diffusion: Case, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with diffusion.open(policy, 0.3, device_options=TWO) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(devices_of(llm)[1]._slots, "image", refuse)
            with pytest.raises(DeviceError, match=f"{LINK}-2 failed: on purpose"):
                diffusion.answer(llm)
        diffusion.check(llm)


def test_a_failing_second_device(diffusion: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with diffusion.open("lru", 0.3, device_options=TWO) as llm:
        with monkeypatch.context() as patch:
            one_by_one(patch)
            broken = Kernels()
            patch.setattr(broken, "gated_mlp", refuse)
            patch.setattr(devices_of(llm)[1], "kernels", broken)
            with pytest.raises(DeviceError, match=f"{COMPUTE}-2 failed: on purpose"):
                diffusion.answer(llm)
        diffusion.check(llm)


def test_a_second_link_that_stalls(diffusion: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    with diffusion.open("lru", 0.3, device_options=TWO) as llm:
        with monkeypatch.context() as patch:
            slots = devices_of(llm)[1]._slots
            image = slots.image

            def late_image(slot: int) -> torch.Tensor:
                release.wait(10)
                return image(slot)

            patch.setattr(slots, "image", late_image)
            patch.setattr(ThreadEvent.wait, "__defaults__", (0.05,))
            timer = threading.Timer(0.5, release.set)
            timer.start()
            with pytest.raises(DeviceError, match=f"({LINK}|{COMPUTE})-2 has not ended .* 0.05 s"):
                diffusion.answer(llm)
            timer.join()
        diffusion.check(llm)


def test_a_second_device_that_was_closed(diffusion: Case) -> None:
    with diffusion.open("lru", 0.3, device_options=TWO) as llm:
        devices_of(llm)[1].close()
        with pytest.raises(DeviceError, match="load the model again|closed"):
            diffusion.answer(llm)


def test_memory_that_the_second_does_not_get(
    diffusion: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_out: list[int] = []

    def scarce(num_bytes: int) -> Arena:
        given_out.append(num_bytes)
        if len(given_out) == 2:
            raise PlanError(f"The system refuses to reserve {num_bytes} bytes.")
        return Arena(num_bytes)

    monkeypatch.setattr(device_engine, "Arena", scarce)
    with pytest.raises(PlanError, match="refuses to reserve"):
        diffusion.open("lowtide", 0.3, device_options=TWO)


# The options


def test_the_number_of_devices_is_an_option(diffusion: Case) -> None:
    assert num_emulated_devices({}) == 1 and num_emulated_devices(TWO) == 2
    with diffusion.open("dali", 0.3, device_options=TWO) as llm:
        assert llm.device.startswith("2 devices, each emulated: link 1e+03 GB/s")
        costs = tier_of(llm).costs
        assert costs.num_devices == 2 and costs.each.link_s == tier_of(llm).link.link_s
        assert sum(d.num_slots for d in devices_of(llm)) == llm.plan.fast_tier.num_slots


@pytest.mark.parametrize("number", ["0", "9", "1.5", "two", "-1"])
def test_a_number_of_devices_that_there_is_not(number: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"devices must be .* 1 to 8, not '{number}'"):
        LLM(tmp_path, device="emulated", device_options={"devices": number})


@pytest.mark.parametrize(("num_gpus", "said"), [(1, "H100"), (2, "H100, the first of 2 GPUs.*")])
def test_a_gpu_among_others_says_so(
    num_gpus: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(make_cuda_device(HostExperts())) as device:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
        assert re.fullmatch(said, device.describe())


@pytest.mark.parametrize("name", ["cuda:0,cuda:1", "cuda:1"])
def test_several_gpus_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"'{name}': one GPU is used.*--device cuda"):
        options: dict[str, Any] = {"device": name}
        LLM(tmp_path, **options)
