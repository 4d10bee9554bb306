"""A GPU that is not there: its tensors lie in host memory, and its work is done late.

Inside `late_cuda()` tensors on "cuda" are wrappers that only know where they are. Every operator
on them is queued on the current stream, and run when the host waits for it or at random moments
before, as a GPU may. What a GPU would refuse or do slowly raises: operators that mix devices,
copies said to be asynchronous from memory that is not pinned, launches over pageable memory.
Triton's launches go to its interpreter. Every hidden wait of the host is counted, and every byte
that is copied to it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from lowtide.engine.running.worker import Worker

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
TOTAL_BYTES = 1 << 30

COMPOSITE = "CompositeImplicitAutograd"
EFFICIENT = 2  # of at::SDPBackend
PADDED_ROWS = 32  # the efficient kernel's log-sum-exps come in such multiples


class CudaTensor(Tensor):
    """Knows where it is; `elements` are on the host, and are not up to date."""

    elements: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elements: Tensor) -> CudaTensor:
        with torch.inference_mode(False):  # what is loaded outside is used inside, too
            made: CudaTensor = Tensor._make_wrapper_subclass(
                cls,
                elements.shape,
                strides=elements.stride(),
                storage_offset=elements.storage_offset(),
                dtype=elements.dtype,
                device=CUDA,
            )
        made.elements = elements
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the GPU from a thread that has nothing to do with it")


class LateEvent:
    """The point in a stream's order that was its end when this was recorded."""

    def __init__(self, stream: LateStream, is_captured: bool = False) -> None:
        self.stream = stream
        self.position = stream.num_queued
        self.is_captured = is_captured

    def query(self) -> bool:
        assert not self.is_captured, "an event of a capture says nothing outside of it"
        for _ in range(self.stream.random.choice((0, 1, 5, 50))):
            self.stream.step_towards(self.position)
        return self.stream.num_done >= self.position


class LateStream:
    """Work in order, begun when it must be."""

    def __init__(self, gpu: LateGpu) -> None:
        self.gpu = gpu
        self.random = gpu.random
        self.queue: deque[Callable[[], object]] = deque()
        self.num_done = 0

    @property
    def num_queued(self) -> int:
        return self.num_done + len(self.queue)

    def step_towards(self, position: int) -> None:
        if self.num_done < position:
            work = self.queue.popleft()
            self.num_done += 1
            with _disable_current_modes():
                work()

    def run_to(self, position: int) -> None:
        while self.num_done < position:
            self.step_towards(position)

    def wait_event(self, event: LateEvent) -> None:
        assert not event.is_captured, "an event of a capture says nothing outside of it"
        self.queue.append(lambda: event.stream.run_to(event.position))

    def record_event(self) -> LateEvent:
        return LateEvent(self, is_captured=self.gpu.capture is not None)


class LateGraph:
    """Work that is queued whenever it is replayed, with the tensors that it was captured with."""

    def __init__(self, gpu: LateGpu) -> None:
        self.gpu = gpu
        self.work: list[Callable[[], object]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        gpu = self.gpu
        assert gpu.capture is None and gpu.current is not gpu.streams[0], "the default stream"
        assert pool is gpu.pool and capture_error_mode == "thread_local"
        if gpu.num_graphs and not gpu.graphs:  # as torch's allocator says it
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        gpu.graphs.add(self)
        gpu.capture = self.work

    def capture_end(self) -> None:
        self.gpu.capture = None
        self.gpu.num_graphs += 1

    def replay(self) -> None:
        assert self.gpu.capture is None, "a graph in a graph"

        def run() -> None:
            for work in self.work:
                work()

        self.gpu.put(run)


class Cudart:
    """Registers host memory, as the driver does."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if address in self.ranges:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.ranges[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.ranges[address]
        return 0

    def holds(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        stop = start + tensor.nbytes
        return any(first <= start and stop <= first + size for first, size in self.ranges.items())


class LateGpu:
    """The streams, what is pinned, and how often the host waited."""

    def __init__(self, seed: int, haste: float) -> None:
        """`haste`: the chance that some work is done when other work is queued."""
        self.random = random.Random(seed)
        self.haste = haste
        self.capture: list[Callable[[], object]] | None = None  # the work so far
        self.pool = object()
        self.num_graphs = 0
        self.graphs = WeakSet[LateGraph]()  # those that hold the pool
        self.streams: list[LateStream] = []
        self.current = self.stream()
        self.cudart = Cudart()
        self.pinned: list[Tensor] = []
        self.num_waits = 0
        self.num_bytes_to_host = 0

    def stream(self, device: Any = None) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def put(self, work: Callable[[], object]) -> None:
        if self.capture is not None:
            self.capture.append(work)
            return
        self.current.queue.append(work)
        while self.random.random() < self.haste:
            stream = self.random.choice(self.streams)
            stream.step_towards(stream.num_queued)

    def wait(self) -> None:
        if self.capture is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_waits += 1
        self.current.run_to(self.current.num_queued)

    def synchronize(self, device: Any = None) -> None:
        assert self.capture is None, "waiting in a capture"
        for stream in self.streams:
            stream.run_to(stream.num_queued)

    @contextmanager
    def use(self, stream: LateStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor)  # for ever: addresses must not come again
        self.cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        return tensor

    def copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """`target.copy_(source)`, of which one is on the GPU."""
        host = [x for x in (target, source) if not isinstance(x, CudaTensor) and x.dim()]
        one, other = _elements(target), _elements(source)
        assert not host or self.capture is None, "in a graph host memory is read when it is others'"
        if host and host[0] is target:
            self.num_bytes_to_host += source.nbytes
        if host and not non_blocking:
            self.wait()
            one.copy_(other)
            return target
        if host:
            self.check_pinned(host[0], "an asynchronous copy")
            is_plain = one.is_contiguous() and other.is_contiguous()
            assert is_plain and one.dtype == other.dtype, "a copy that needs temporaries"
        self.put(lambda: one.copy_(other))
        return target

    def check_pinned(self, tensor: Tensor, doing: str) -> None:
        assert self.capture is None, f"{doing} in a graph, when host memory is others'"
        assert self.cudart.holds(tensor), f"{doing} with host memory that is not pinned"


class _Functions(TorchFunctionMode):
    """Functions that a torch without CUDA refuses before an operator is reached."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if kwargs.pop("pin_memory", False):
            return self.gpu.pin(func(*args, **kwargs))
        if func is torch.tensor and "cuda" in str(kwargs.get("device")):
            assert self.gpu.capture is None, "a copy in a graph from memory that is not there later"
            return CudaTensor(func(*args, **{**kwargs, "device": "cpu"}))
        if name == "copy_" and any(isinstance(arg, CudaTensor) for arg in args[:2]):
            return self.gpu.copied(*args, **kwargs)
        if name == "to" and _is_gpu(args[1]):
            if isinstance(args[0], CudaTensor):
                return args[0].to(*args[2:], **kwargs) if len(args) > 2 or kwargs else args[0]
            is_queued = kwargs.pop("non_blocking", False)
            source = args[0].to(*args[2:], **kwargs)
            return self.gpu.copied(CudaTensor(torch.empty_like(source)), source, is_queued)
        if not args or not isinstance(args[0], CudaTensor):
            if name == "__setitem__" and isinstance(args[2], CudaTensor):
                args[0][args[1]].copy_(args[2])
                return None
            return func(*args, **kwargs)
        this = args[0]
        if name in ("item", "__int__", "__float__", "__bool__", "__index__", "tolist"):
            self.gpu.wait()
            return func(this.elements, *args[1:], **kwargs)
        if name == "data_ptr":
            raise AssertionError("the address of GPU memory was asked for on the host")
        if name == "contiguous":  # of others torch asks the device itself
            is_whole = this.is_contiguous()
            return this if is_whole else this.clone(memory_format=torch.contiguous_format)
        if name == "__getitem__":
            return self._item(this, args[1])
        if name == "__setitem__":
            self._set_item(this, args[1], args[2])
            return None
        return func(*args, **kwargs)

    def _item(self, this: CudaTensor, index: Any) -> Tensor:
        if not _has_tensor(index):
            return CudaTensor(this.elements[index])
        index = tree_map(_elements, index)
        found = torch.empty_like(this.elements[_in_range(index)])
        self.gpu.put(lambda: found.copy_(this.elements[index]))
        return CudaTensor(found)

    def _set_item(self, this: CudaTensor, index: Any, value: Any) -> None:
        if _has_tensor(index):
            index, value = tree_map(_elements, index), tree_map(_elements, value)
            self.gpu.put(lambda: this.elements.__setitem__(index, value))
        elif isinstance(value, Tensor):
            self.gpu.copied(CudaTensor(this.elements[index]), value)
        else:
            CudaTensor(this.elements[index]).fill_(value)


class Operators(TorchDispatchMode):
    """Queues operators on GPU tensors; views are made at once."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        is_cuda = [isinstance(tensor, CudaTensor) for tensor in tensors]
        if func.overloadpacket in (aten.to, aten._to_copy) and kwargs.get("device") is not None:
            return self._moved(func, args, kwargs)
        if func is aten.copy_.default and any(is_cuda):
            return self.gpu.copied(*args, **kwargs)
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
            values = func(*tree_map(_elements, args), **kwargs)
            if self.gpu.capture is not None and func is not aten.empty.memory_format:
                made = values.clone()
                self.gpu.put(lambda: made.copy_(values))
                return CudaTensor(made)
            return CudaTensor(values)
        if not any(is_cuda):
            return func(*args, **kwargs)
        on_host = [t for t, is_there in zip(tensors, is_cuda, strict=True) if not is_there]
        assert all(t.dim() == 0 for t in on_host), f"{func} mixes host and GPU tensors"
        if func is aten._fused_sdp_choice.default:
            return EFFICIENT
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
            with self:  # inference mode hands these over whole
                return func.decompose(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.gpu.wait()
            return func(*tree_map(_elements, args))
        if func is aten._scaled_dot_product_efficient_attention.default:
            func = _efficient_attention
        elif func.is_view or func is aten._unsafe_view.default:
            return tree_map(_wrapped, func(*tree_map(_elements, args), **kwargs))
        elif func._schema.is_mutable:
            elements = tree_map(_elements, (args, kwargs))
            self.gpu.put(lambda: func(*elements[0], **elements[1]))
            return kwargs.get("out", args[0])
        return self._computed(func, *tree_map(_elements, (args, kwargs)))

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """New tensors, of the shapes that the operator would give; their elements come later."""
        meta_args, meta_kwargs = tree_map(_on_meta, (args, kwargs))
        results = tree_map(garbage, func(*meta_args, **meta_kwargs))

        def work() -> None:
            found = tree_iter(func(*args, **kwargs))
            for result, value in zip(tree_iter(results), found, strict=True):
                if isinstance(result, Tensor):
                    result.copy_(value)

        self.gpu.put(work)
        return tree_map(_wrapped, results)

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        source = args[0]
        goes_to_gpu = kwargs["device"].type == "cuda"
        if not goes_to_gpu and not isinstance(source, CudaTensor):
            return func(*args, **kwargs)
        kwargs["device"] = torch.device("cpu")
        if isinstance(source, CudaTensor) and not goes_to_gpu:
            self.gpu.wait()
            self.gpu.num_bytes_to_host += source.nbytes
            moved: Tensor = func(source.elements, **kwargs)
            return moved
        if isinstance(source, CudaTensor):
            return self._computed(func, (source.elements,), {**kwargs, "device": None})
        return CudaTensor(func(source, **kwargs))


def _efficient_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel's conditions, as its launch checks them, and its padded log-sum-exps."""
    alignment = 16 // query.dtype.itemsize
    assert query.dim() == keys.dim() == values.dim() == 4
    assert query.shape[:2] == keys.shape[:2] == values.shape[:2]
    assert all(x.stride(-1) == 1 for x in (query, keys, values))
    if bias is not None:
        assert bias.dtype == query.dtype and bias.stride(-1) == 1
        assert bias.shape == (*query.shape[:3], keys.shape[2]), "the bias must be expanded"
        assert query.shape[2] == 1 or bias.stride(2) % alignment == 0, "the bias's rows unaligned"
    padding = -query.shape[2] % PADDED_ROWS
    if query.device.type == "meta":
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        output = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
    else:
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, dropout, is_causal, attn_mask=bias, scale=scale
        )
    seed = query.new_zeros((), dtype=torch.int64)
    return output, torch.nn.functional.pad(sums, (0, padding), value=torch.nan), seed, seed


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's own, for what operators are given and return; several times as fast."""
    if isinstance(tree, list | tuple):
        return type(tree)([tree_map(change, branch) for branch in tree])
    if isinstance(tree, dict):
        return {name: tree_map(change, branch) for name, branch in tree.items()}
    return change(tree)


def tree_iter(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for branch in tree:
            yield from tree_iter(branch)
    elif isinstance(tree, dict):
        yield from tree_iter(list(tree.values()))
    else:
        yield tree


def _elements(leaf: Any) -> Any:
    return leaf.elements if isinstance(leaf, CudaTensor) else leaf


def _wrapped(leaf: Any) -> Any:
    return CudaTensor(leaf) if isinstance(leaf, Tensor) else leaf


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def garbage(leaf: Any) -> Any:
    """Memory as a GPU hands it out."""
    if not isinstance(leaf, Tensor):
        return leaf
    memory = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
    return memory.fill_(torch.nan if leaf.is_floating_point() else 77)


def _is_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.device | str) and torch.device(leaf).type == "cuda"


def _has_tensor(index: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_iter(index))


def _in_range(index: Any) -> Any:
    """An index of the same shape that is safe before the real one is known."""
    return tree_map(lambda i: torch.zeros_like(i) if isinstance(i, Tensor) else i, index)


@contextmanager
def late_cuda(
    patch: pytest.MonkeyPatch,
    seed: int = 0,
    haste: float = 0.0,
    total_bytes: int = TOTAL_BYTES,
    capability: tuple[int, int] = (9, 0),
) -> Iterator[LateGpu]:
    """Meanwhile torch has a GPU of `total_bytes` and a compute capability."""
    gpu = LateGpu(seed, haste)
    run = InterpretedFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not any(isinstance(arg, CudaTensor) for arg in args):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        for arg in args:
            if isinstance(arg, Tensor) and not isinstance(arg, CudaTensor):
                gpu.check_pinned(arg, f"{self.__name__} was launched")
        there = [_elements(arg) for arg in args]
        gpu.put(lambda: run(self, *there, grid=grid, warmup=False, **kwargs))
        return None

    properties = SimpleNamespace(total_memory=total_bytes)
    replacements = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "current_device": lambda: CUDA.index,
        "current_stream": lambda device=None: gpu.current,
        "cudart": lambda: gpu.cudart,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: "late",
        "graph_pool_handle": lambda: gpu.pool,
        "is_current_stream_capturing": lambda: gpu.capture is not None,
        "get_device_properties": lambda device=None: properties,
        "max_memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (total_bytes, total_bytes),
        "reset_peak_memory_stats": lambda device=None: None,
        "stream": gpu.use,
        "set_device": lambda device: None,
        "CUDAGraph": lambda: LateGraph(gpu),
        "Stream": gpu.stream,
        "synchronize": gpu.synchronize,
    }
    with patch.context() as patches:
        for name, replacement in replacements.items():
            patches.setattr(torch.cuda, name, replacement)
        patches.setattr(InterpretedFunction, "run", launch)
        serve = Worker.serve

        def serve_late(worker: Worker) -> None:  # modes belong to a thread
            with Operators(gpu), _Functions(gpu):
                serve(worker)

        patches.setattr(Worker, "serve", serve_late)
        with Operators(gpu), _Functions(gpu):
            yield gpu
