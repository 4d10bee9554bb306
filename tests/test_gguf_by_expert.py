"""GGUF files with a tensor for each expert, as the first of Mixtral, whose types may differ."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from examples import scaled
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import add_metadata, finish, packed, tensors_of
from gguf_oracle import WIDTH, check, random_model
from inside import engine_of

from lowtide.core import Curve, MoEShape
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.errors import UnsupportedError
from lowtide.experts.device import ExpertGroup
from lowtide.experts.layout import SlotLayout
from lowtide.formats import formats
from lowtide.formats.mixed import mixed
from lowtide.hardware.cold_weights import ColdWeights
from lowtide.hardware.streams import DeviceStream
from lowtide.kernels.compiled import CompiledKernels
from lowtide.lab.emulated.device import EmulatedDevice
from lowtide.lab.emulated.speeds import EmulatedSpeeds
from lowtide.llm import LLM, plan_model
from lowtide.memory.arena import Arena
from lowtide.threads.executor import HostExecutor

Kinds = Callable[[str, int], Type]
"""An expert's type, by the name of its tensor's stack and its number."""


def write_by_expert(path: Path, kind_of: Kinds, seed: int = 0) -> torch.nn.Module:
    """Mixtral as the oldest files have it, each expert a tensor."""
    model = random_model("mixtral", seed)
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, "mixtral", model.config)

    def put(name: str, view: torch.Tensor, shape: tuple[int, ...], kind: Type) -> None:
        weights, seed = view.float().contiguous().numpy(), len(writer.tensors[0])
        data = packed(weights.reshape(shape), kind, seed)
        view.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind).reshape(view.shape).copy()))
        writer.add_tensor(name, data, raw_dtype=kind)

    for name, view, shape in tensors_of("mixtral", model):
        if "_exps" not in name:
            put(name, view, shape, Type.F32)
            continue
        for expert, each in enumerate(view):
            own_name = name.replace("_exps", f".{expert}")
            put(own_name, each, tuple(each.shape), kind_of(name, expert))
    finish(writer)
    return model


def in_turn(*kinds: Type) -> Kinds:
    return lambda name, expert: kinds[expert % len(kinds)]


def as_published(name: str, expert: int) -> Type:
    """Down mixes two types in one layer, as Q4_K_M would have it; the last layer is all of one."""
    if "ffn_down" in name and "blk.0." in name:
        return Type.Q6_K if expert in (1, 4) else Type.Q4_K
    return Type.Q4_K


def at_random(name: str, expert: int) -> Type:
    kinds = [Type.Q4_K, Type.Q6_K, Type.Q8_0, Type.Q5_0, Type.F16, Type.IQ4_XS]
    return random.Random(f"{name} {expert}").choice(kinds)


MIXTURES: dict[str, Kinds] = {
    "all of one": in_turn(Type.Q4_K),
    "two in turn": in_turn(Type.Q4_K, Type.Q6_K),
    "as published": as_published,
    "at random": at_random,
    "some not packed": in_turn(Type.Q8_0, Type.F16, Type.F32),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_types_may_differ_among_the_experts_of_a_layer(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_by_expert(path, MIXTURES[name])
    check(path, model)
    check(path, model, host_memory=plan_model(path, context=256, dtype="float32").minimum_bytes)
    check(path, model, device="emulated", gpu_memory="16MiB")


def test_a_matrix_has_the_bits_of_a_file_of_one_type(tmp_path: Path) -> None:
    """Of the experts that are alike in both: what is multiplied with, compiled or not."""
    mixed, plain = tmp_path / "mixed.gguf", tmp_path / "plain.gguf"
    write_by_expert(mixed, as_published)
    write_by_expert(plain, in_turn(Type.Q4_K))
    with LLM(mixed, context=64) as one, LLM(plain, context=64) as other:
        for layer, expert in itertools.product(range(2), range(6)):
            ours, theirs = (each.expert_columns(layer, expert, 8) for each in (one, other))
            is_odd = layer == 0 and expert in (1, 4)
            assert torch.equal(ours, theirs) != is_odd


def test_a_slot_is_as_large_as_the_largest_expert(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_by_expert(path, as_published)
    plan = plan_model(path)
    weights = WIDTH * WIDTH
    assert plan.host.slot_bytes == weights // 256 * (144 + 144 + 210) + 64  # and which it is
    assert plan.formats.experts == "Q4_K, Q6_K"
    assert plan_model(path, expert_dtype="bfloat16").host.slot_bytes == 3 * weights * 2
    with pytest.raises(UnsupportedError, match="Q[46]_K, which is rounded already"):
        plan_model(path, expert_dtype="q4")


def test_kernels_are_the_compiled_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_by_expert(path, as_published)
    with LLM(path, context=64) as llm, LLM(path, context=64, kernels="reference") as reference:
        if not isinstance(engine_of(llm).kernels, CompiledKernels):
            pytest.skip("nothing is compiled here")
        ours, theirs = (each.logits(list(range(30))) for each in (llm, reference))
    assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max()


def test_costs_of_such_experts_can_be_measured(tmp_path: Path) -> None:
    """Of any bytes, as doctor has them."""
    path = tmp_path / "model.gguf"
    write_by_expert(path, as_published)
    layout = open_model(path, EngineConfig(context=64)).memory.experts.layout
    with closing(HostExecutor(2)) as executor:
        cold = ColdWeights(layout, executor, 1)
    for layer, slot in itertools.product(range(2), range(cold.num_slots)):
        formats = [each.format.name for each in cold.slots.weights(layer, slot)]
        assert formats == ["Q4_K", "Q4_K", "Q4_K" if layer else "Q6_K"]
    assert [each.name for each in layout.largest.largest_formats] == ["Q4_K", "Q4_K", "Q6_K"]


@pytest.mark.parametrize("seed", range(scaled(12)))
def test_what_is_measured_is_the_largest_whatever_other_layers_have(seed: int) -> None:
    """Layers may say in the same byte of a slot which type a part is in."""
    kinds, rng = [formats()[name] for name in ("Q4_0", "Q5_0", "Q8_0")], random.Random(seed)
    kept = [(mixed(tuple(rng.sample(kinds, rng.choice((2, 3))))),) * 3 for _ in range(4)]
    layout = SlotLayout.of(MoEShape(4, 6, 2, 64, 32), torch.float32, kept=kept)
    largest = layout.layers.index(layout.largest)
    with closing(HostExecutor(2)) as executor:
        cold = ColdWeights(layout, executor, 1)
    for slot in range(cold.num_slots):
        found = tuple(each.format for each in cold.slots.weights(largest, slot))
        assert found == layout.largest.largest_formats


def test_a_device_measures_the_layer_that_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has other types here, and its experts are smaller."""
    q4_0, q5_0, q8_0 = (formats()[name] for name in ("Q4_0", "Q5_0", "Q8_0"))
    kept = [(mixed(variants),) * 3 for variants in ((q4_0, q5_0), (q4_0, q5_0, q8_0))]
    shape, num_slots = MoEShape(2, 6, 2, 64, 32), 4
    layout, layers = SlotLayout.of(shape, torch.float32, kept=kept), set()
    speeds = EmulatedSpeeds(1e15, 0.0, 1.0, Curve([(1, 0.0)]))
    arena, run = Arena(num_slots * layout.num_bytes), EmulatedDevice.run

    def noted(device: EmulatedDevice, group: ExpertGroup, *others: Any) -> Any:
        layers.add(group.layer)
        return run(device, group, *others)

    monkeypatch.setattr(EmulatedDevice, "run", noted)
    with closing(HostExecutor(2)) as executor:
        weights = ColdWeights(layout, executor, 1)
    with closing(EmulatedDevice(arena, layout, num_slots, speeds)) as device:
        assert DeviceStream(shape, weights, device).sample(2) > 0
    assert layers == {1}


def test_layers_with_the_same_types_are_alike(tmp_path: Path) -> None:
    """In whatever order their experts have them."""
    orders = {"blk.0.": (Type.Q8_0, Type.Q4_0), "blk.1.": (Type.Q4_0, Type.Q8_0)}
    path = tmp_path / "model.gguf"
    write_by_expert(path, lambda name, expert: orders[name[:6]][expert % 2])
    first, second = open_model(path, EngineConfig(context=64)).memory.experts.layout.layers
    assert first is second
