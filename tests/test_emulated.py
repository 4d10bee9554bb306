"""The emulated device: order, overlap, bits, failures and the time it pretends to take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from time import perf_counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from whole import no_more_threads

from lowtide.core import Curve, MoEShape
from lowtide.errors import DeviceError, UsageError
from lowtide.experts.device import ExpertGroup
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.experts.slots import ExpertSlots
from lowtide.kernels.reference import REFERENCE
from lowtide.lab.emulated.device import COMPUTE, HOST, LINK, EmulatedDevice, Span
from lowtide.lab.emulated.speeds import EmulatedSpeeds, check_emulated_options, emulated_speeds
from lowtide.lab.profiles import load_profile
from lowtide.memory.arena import Arena
from lowtide.threads.event import Event
from lowtide.threads.stream import ThreadStream

SHAPE = MoEShape(1, num_experts=5, num_experts_per_token=2, hidden_size=32, expert_size=24)
LAYOUT = SlotLayout.of(SHAPE, torch.float32)
NUM_SLOTS = 3
AT_ONCE = EmulatedSpeeds(1e15, 0.0, 1.0, Curve([(1, 0.0)]))
LONG_S = 60.0  # more than any test here lasts


class Signal(threading.Event):
    """An event that a test sets."""

    is_done = threading.Event.is_set


def speeds(link_s: float = 0.0, host_s: float = 0.0, device_s: float = 0.0) -> EmulatedSpeeds:
    """Copies, and experts with one token, of these times."""
    on_device, on_host = Curve([(1, device_s)]), Curve([(1, host_s)])
    return EmulatedSpeeds(1e15, link_s, 1.0, on_device, host_curve=on_host)


def make_device(chosen: EmulatedSpeeds = AT_ONCE, layout: SlotLayout = LAYOUT) -> EmulatedDevice:
    device = EmulatedDevice(Arena(NUM_SLOTS * layout.num_bytes), layout, NUM_SLOTS, chosen)
    device.timeline = []
    return device


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with closing(make_device()) as made:
        yield made


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    with no_more_threads():
        yield


def make_experts(layout: SlotLayout = LAYOUT, seed: int = 0) -> ExpertSlots:
    """All experts in host memory, expert e in slot e."""
    arena = Arena(SHAPE.num_experts * layout.num_bytes)
    elements = arena.bytes.view(layout.dtype)
    elements.normal_(generator=torch.Generator().manual_seed(seed))
    return ExpertSlots(arena, layout)


class Layer(NamedTuple):
    rows: ExpertRows
    buffers: ExpertBuffers


def make_layer(num_tokens: int = 12, seed: int = 0, dtype: torch.dtype = torch.float32) -> Layer:
    """A step's pairs, their inputs in `buffers.parts`."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, SHAPE.num_experts, generator=draw).argsort(1)
    rows = ExpertRows(
        REFERENCE.sort_pairs(
            order[:, : SHAPE.num_experts_per_token].sort(1).values, SHAPE.num_experts
        )
    )
    x = torch.randn(num_tokens, SHAPE.hidden_size, generator=draw).to(dtype)
    num_pairs = num_tokens * SHAPE.num_experts_per_token
    gate, up = (torch.empty(num_pairs, SHAPE.expert_size, dtype=dtype) for _ in range(2))
    return Layer(rows, ExpertBuffers(x[rows.token_of], gate, up))


def group(pairs: dict[int, int]) -> ExpertGroup:
    """`pairs`: expert to slot."""
    experts = sorted(pairs)
    return ExpertGroup(0, np.array(experts), np.array([pairs[expert] for expert in experts]))


def compute(layer: Layer, expert: int, weights: ExpertSlots, slot: int) -> None:
    """One expert's products, as the runtime without a device does them."""
    pairs, buffers = layer.rows.pairs(expert), layer.buffers
    parts = buffers.parts[pairs]
    REFERENCE.gated_mlp(
        parts, weights.weights(0, slot), buffers.gate[pairs], buffers.up[pairs], parts
    )


def spans_of(device: EmulatedDevice, stream: str) -> list[Span]:
    assert device.timeline is not None
    return [span for span in device.timeline if span.stream == stream]


def test_a_run_waits_for_its_copy_and_a_copy_for_the_slots_last_use() -> None:
    experts, layer, may_begin = make_experts(), make_layer(), Signal()
    with closing(make_device(speeds(link_s=0.02))) as device:
        first = device.copy(experts.image(0), 1, may_begin)
        use = device.run(group({0: 1}), *layer, first)
        assert not use.is_done()
        may_begin.set()
        second = device.copy(experts.image(2), 1, use)
        device.run(group({2: 1}), *layer, second).wait()
        (copy_1, copy_2), (run_1, run_2) = spans_of(device, LINK), spans_of(device, COMPUTE)
    assert copy_1.end_s <= run_1.start_s <= run_1.end_s
    assert run_1.end_s <= copy_2.start_s < copy_2.end_s <= run_2.start_s
    assert (copy_1.name, run_1.name, run_2.name) == ("copy 1", "run [0]", "run [2]")


def test_copies_go_in_order_and_each_begins_where_the_last_one_ended() -> None:
    """Late wake-ups do not add up: to the emulated link there is no gap between copies."""
    experts = make_experts()
    with closing(make_device(speeds(link_s=0.003))) as device:
        events = [device.copy(experts.image(e), e % NUM_SLOTS, None) for e in range(5)]
        events[-1].wait()
        assert all(event.is_done() for event in events)
        spans = spans_of(device, LINK)
    assert [span.name for span in spans] == [f"copy {e % NUM_SLOTS}" for e in range(5)]
    assert all(a.end_s == b.start_s for a, b in zip(spans, spans[1:], strict=False))


def test_times_are_honoured() -> None:
    experts = make_experts()
    slow = EmulatedSpeeds(LAYOUT.num_bytes / 0.004, 0.002, 3.0, Curve([(1, 0.001), (2, 0.002)]))
    assert slow.link_s(LAYOUT.num_bytes) == pytest.approx(0.006)
    with closing(make_device(slow)) as device:
        start_s = perf_counter()
        for expert in range(3):
            copied = device.copy(experts.image(expert), expert, None)
        copied.wait()
        assert perf_counter() - start_s >= 3 * 0.006
        start_s = perf_counter()
        device.host_work([4, 1], lambda: None)()
        assert perf_counter() - start_s >= 3 * (0.004 + 0.001)


def test_the_host_is_one_processor() -> None:
    """Two threads do not make the emulated host twice as fast."""
    with closing(make_device(speeds(host_s=0.01))) as device, ThreadPoolExecutor(2) as threads:
        start_s = perf_counter()
        for future in [threads.submit(device.host_work([1], lambda: None)) for _ in range(4)]:
            future.result()
        assert perf_counter() - start_s >= 4 * 0.01


def test_host_device_and_link_work_at_the_same_time() -> None:
    experts, layer = make_experts(), make_layer()
    have_begun, has_run = threading.Barrier(3, timeout=LONG_S), threading.Event()

    def last_until_it_has_run() -> None:
        have_begun.wait()
        assert has_run.wait(LONG_S)

    with (
        closing(make_device(speeds(link_s=0.02, host_s=0.02))) as device,
        ThreadPoolExecutor(1) as threads,
        pytest.MonkeyPatch.context() as patch,
    ):
        image = ExpertSlots.image

        def late_image(slots: ExpertSlots, slot: int) -> torch.Tensor:
            if threading.current_thread().name == LINK:
                last_until_it_has_run()
            return image(slots, slot)

        patch.setattr(ExpertSlots, "image", late_image)
        host = threads.submit(device.host_work([1], last_until_it_has_run))
        copied = device.copy(experts.image(0), 0, None)
        have_begun.wait()
        device.run(group({1: 1}), *layer, None)
        device.join()
        has_run.set()
        copied.wait()
        host.result()
        (copy,), (run,), (on_host,) = (spans_of(device, s) for s in (LINK, COMPUTE, HOST))
    for beside in (copy, on_host):
        assert beside.start_s < run.start_s < run.end_s < beside.end_s
    assert on_host.name == "1 experts, 1 tokens"


def test_no_gradients_and_one_thread_on_the_device() -> None:
    before = torch.get_num_threads()
    settings: list[tuple[bool, int]] = []
    stream = ThreadStream(COMPUTE)
    assert torch.get_num_threads() == before

    def note(ready_s: float) -> None:
        settings.append((torch.is_inference_mode_enabled(), torch.get_num_threads()))

    stream.queue(note).wait()
    stream.stop()
    stream.join()
    assert settings == [(True, 1)] and torch.get_num_threads() == before


def test_a_failed_copy_fails_what_waits_for_it_and_no_more(device: EmulatedDevice) -> None:
    experts, layer = make_experts(), make_layer()
    bad = device.copy(torch.zeros(5, dtype=torch.uint8), 0, None)
    good = device.copy(experts.image(1), 1, None)
    use = device.run(group({0: 0}), *layer, bad)
    again = device.copy(experts.image(0), 0, use)
    other = device.run(group({1: 1}), *layer, good)
    for event, name in ((bad, LINK), (use, COMPUTE), (again, LINK)):
        with pytest.raises(DeviceError, match=name) as caught:
            event.wait()
        assert event.is_done() and caught.value.__cause__ is not None
    good.wait()
    other.wait()
    with pytest.raises(DeviceError, match="must match the size"):
        device.join()
    device.drain()
    device.run(group({1: 1}), *layer, None)
    device.join()


def test_a_failed_copy_is_not_passed_over(device: EmulatedDevice) -> None:
    """A run that waits for the last of several copies would else compute from old bytes."""
    experts, layer = make_experts(), make_layer()
    device.copy(torch.zeros(5, dtype=torch.uint8), 0, None)
    last = device.copy(experts.image(1), 1, None)
    device.run(group({0: 0, 1: 1}), *layer, last).wait()
    with pytest.raises(DeviceError, match=LINK):
        device.join()


def test_a_failed_run_is_an_error_of_the_join(device: EmulatedDevice) -> None:
    layer = make_layer()
    bad = device.run(group({0: NUM_SLOTS}), *layer, None)
    device.run(group({1: 1}), *layer, None)
    for _ in range(2):
        with pytest.raises(DeviceError, match=COMPUTE):
            device.join()
    device.drain()
    device.join()
    with pytest.raises(DeviceError, match=COMPUTE):
        bad.wait()
    device.run(group({0: NUM_SLOTS}), *layer, None)
    with pytest.raises(DeviceError, match=COMPUTE):
        device.join()
    device.drain()
    device.join()  # though nothing runs after the failure


def test_ctrl_c_before_a_stream_is_told_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(told: threading.Condition) -> None:
        raise KeyboardInterrupt

    stream, is_done = ThreadStream(LINK), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "notify_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stream.queue(lambda ready_s: is_done.set())
    stream.drain()
    assert is_done.is_set()
    stream.stop()
    stream.join()


def test_a_stalled_link_is_an_error(device: EmulatedDevice) -> None:
    with closing(make_device(speeds(link_s=LONG_S))) as stalled:
        copied = stalled.copy(make_experts().image(0), 0, None)
        use = stalled.run(group({0: 0}), *make_layer(), copied)
        for event, name in ((copied, LINK), (use, COMPUTE)):
            with pytest.raises(DeviceError, match=f"{name}.* 0.02 s.*link_GBps"):
                event.wait(0.02)
            assert not event.is_done()


def test_a_stream_that_hangs_is_an_error() -> None:
    stream, go_on = ThreadStream(LINK), threading.Event()
    stream.queue(lambda ready_s: go_on.wait(LONG_S) and None)
    for wait in (stream.drain, stream.join):
        with pytest.raises(DeviceError, match=f"{LINK}.* 0.01 s"):
            wait(0.01)
    go_on.set()
    stream.drain()
    stream.stop()
    stream.join()


def test_work_may_wait_for_what_is_no_stream(device: EmulatedDevice) -> None:
    signal, experts = Signal(), make_experts()
    copied = device.copy(experts.image(0), 0, signal)
    signalled_s = perf_counter()
    assert not copied.is_done()
    signal.set()
    copied.wait()
    (span,) = spans_of(device, LINK)
    assert span.start_s >= signalled_s


def test_closing_ends_what_is_queued() -> None:
    experts, layer = make_experts(), make_layer()
    device = make_device(speeds(link_s=LONG_S, host_s=LONG_S))
    with ThreadPoolExecutor(1) as threads:
        host = threads.submit(device.host_work([1], lambda: None))
        copied = device.copy(experts.image(0), 0, None)
        events: list[Event] = [copied, device.run(group({0: 0}), *layer, copied)]
        events.append(device.copy(experts.image(1), 0, events[-1]))
        device.close()
        for event in events:
            with pytest.raises(DeviceError, match="closed"):
                event.wait()
        with pytest.raises(DeviceError, match="closed"):
            host.result()
    with pytest.raises(DeviceError, match="closed"):
        device.copy(experts.image(0), 0, None)
    with pytest.raises(DeviceError, match="closed"):
        device.run(group({0: 0}), *layer, None)
    device.drain()
    device.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_leaves_errors_behind() -> None:
    stream = ThreadStream(LINK)
    go_on = threading.Event()

    def die(ready_s: float) -> None:
        go_on.wait()
        raise SystemExit

    events = [stream.queue(die), stream.queue(lambda ready_s: None)]
    go_on.set()
    for event in events:
        with pytest.raises(DeviceError, match=f"thread of {LINK} has ended"):
            event.wait()
    with pytest.raises(DeviceError, match=f"thread of {LINK} has ended"):
        stream.queue(lambda ready_s: None)
    stream.drain()
    stream.stop()
    stream.join()


def test_speeds_keep_the_ratios_of_the_profile() -> None:
    before = torch.get_num_threads()
    shape = SHAPE._replace(hidden_size=256, expert_size=128)
    layout = SlotLayout.of(shape, torch.bfloat16)
    made = emulated_speeds({}, layout, shape)
    assert torch.get_num_threads() == before
    costs = load_profile("dali-3090").costs(shape)
    device_s = made.device_s.at(1)
    assert device_s > 0
    assert made.link_s(layout.num_bytes) / device_s == pytest.approx(
        costs.link_s / costs.device_s.at(1)
    )
    for num_tokens in (1, 8, 64):
        ratio = costs.host_s.at(num_tokens) / costs.device_s.at(1)
        assert made.host_s.at(num_tokens) / device_s == pytest.approx(ratio)
    assert "emulated" in made.describe() and "RTX 3090" in made.describe()
    assert "as given" not in made.describe()


def test_experts_last_as_long_as_the_device_is_said_to_take() -> None:
    layer = make_layer()
    with closing(make_device(speeds(device_s=0.02))) as device:
        for groups in ({1: 1}, {1: 1, 2: 0}):
            start_s = perf_counter()
            device.run(group(groups), *layer, None)
            device.join()
            assert perf_counter() - start_s >= 0.02 * len(groups)


def test_a_slower_device_stretches_everything() -> None:
    shape = SHAPE._replace(hidden_size=256, expert_size=128)
    layout = SlotLayout.of(shape, torch.bfloat16)
    made = emulated_speeds({"device_slowdown": "1000"}, layout, shape)
    costs = load_profile("dali-3090").costs(shape)
    fast_s = emulated_speeds({}, layout, shape).device_s.at(1)
    assert made.device_s.at(1) > 10 * fast_s
    ratio = costs.link_s / costs.device_s.at(1)
    assert made.link_s(layout.num_bytes) / made.device_s.at(1) == pytest.approx(ratio)
    assert "1e+03 times a core's time" in made.describe()


def test_options_replace_parts() -> None:
    options = {"link_GBps": "0.5", "link_latency_us": "7"}
    made = emulated_speeds(options, LAYOUT, SHAPE)
    assert made.link_bytes_per_s == 0.5e9 and made.link_latency_s == pytest.approx(7e-6)
    assert made.host_slowdown > 1
    described = made.describe()
    assert "link 0.5 GB/s + 7 us" in described
    assert "as given: link_GBps, link_latency_us" in described


def test_more_tokens_never_take_less_time() -> None:
    """Also of an expert that is far larger than what is measured of it."""
    for shape in (SHAPE, SHAPE._replace(hidden_size=2048, expert_size=8192)):
        layout = SlotLayout.of(shape, torch.float32)
        curve = emulated_speeds({}, layout, shape).device_s
        seconds = curve(2 ** np.arange(12))
        assert (np.diff(seconds) >= 0).all() and seconds[0] > 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("speed", "1", "link_GBps, link_latency_us, host_slowdown"),
        ("link_GBps", "0", "link_GBps must be a number from"),
        ("link_GBps", "-1", "'-1'"),
        ("link_GBps", "fast", "'fast'"),
        ("link_GBps", "inf", "'inf'"),
        ("link_latency_us", "-0.1", "from 0"),
        ("host_slowdown", "0.5", "from 1"),
        ("host_slowdown", "nan", "'nan'"),
        ("device_slowdown", "0.9", "from 1"),
    ],
)
def test_bad_options_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_emulated_options({name: value})
