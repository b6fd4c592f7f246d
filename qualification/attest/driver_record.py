"""The kernels of a call by the driver's own record: the call is captured into a CUDA graph, whose kernel nodes have
names, and the graph runs in its place.

For a server, which must not use the profiler: once CUPTI has been used, a replay of a decode graph takes 83 us longer
for good (H200, driver 580.159, 350 nodes), and cuptiFinalize then breaks replays.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from qualification.common.kernel_names import is_helper, short_name
from qualification.measure.profile import Seen

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class DriverError(RuntimeError):
    """The CUDA driver does not say what was captured."""


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2. Source: the CUDA driver API's documentation."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),  # grid, block, shared bytes
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class Recorder:
    """Names the kernels of marked calls on one device."""

    def __init__(self, device: torch.device) -> None:
        """Load the CUDA driver. Raises DriverError where there is none."""
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"the CUDA driver's library cannot be loaded: {error}") from error
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._calls: list[Counter[str]] = []

    @contextmanager
    def mark(self) -> Iterator[None]:
        """Capture the launches of this context, name their kernels, run them. They must not wait for the device."""
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield
                self._calls.append(self.kernels())
            finally:
                graph.capture_end()
        current.wait_stream(self._side)
        graph.replay()
        current.synchronize()  # before the graph and its memory are gone

    def calls_seen(self, calls: Sequence[Callable[[], object]]) -> Seen:
        """Record each of `calls` as a marked call, after it has run once: no capture may compile anything."""
        for call in calls:
            call()
            with self.mark():
                call()
        return self.take()

    def take(self) -> Seen:
        """The calls marked since the last one."""
        calls, self._calls = self._calls, []
        return Seen(tuple(calls), Counter())

    def kernels(self) -> Counter[str]:
        """Count the kernels in the current stream's capture so far, data movers left out.

        Raises DriverError.
        """
        names = (short_name(name) for name in self._names(torch.cuda.current_stream().cuda_stream))
        return Counter(name for name in names if not is_helper(name))

    def _names(self, stream: int) -> Iterator[str]:
        graph = self._graph(stream)
        num_nodes = ctypes.c_size_t()
        self._call("cuGraphGetNodes", graph, None, ctypes.byref(num_nodes))
        nodes = (ctypes.c_void_p * num_nodes.value)()
        self._call("cuGraphGetNodes", graph, nodes, ctypes.byref(num_nodes))
        for node in nodes:
            kind = ctypes.c_int()
            self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
            if kind.value == _KERNEL_NODE:
                yield self._name(ctypes.c_void_p(node))

    def _graph(self, stream: int) -> ctypes.c_void_p:
        status, graph = ctypes.c_int(), ctypes.c_void_p()
        ids, dependencies, num_dependencies = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
        self._call(
            "cuStreamGetCaptureInfo_v2",
            ctypes.c_void_p(stream),
            ctypes.byref(status),
            ctypes.byref(ids),
            ctypes.byref(graph),
            ctypes.byref(dependencies),
            ctypes.byref(num_dependencies),
        )
        if not graph.value:
            raise DriverError("nothing is being captured")
        return graph

    def _name(self, node: ctypes.c_void_p) -> str:
        params, name = _KernelParams(), ctypes.c_char_p()
        self._call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
        if params.func:
            self._call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
        else:
            self._call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kern))
        return (name.value or b"").decode()

    def _call(self, function: str, *arguments: object) -> None:
        if not hasattr(self._driver, function):
            raise DriverError(f"this driver has no {function}")
        code = getattr(self._driver, function)(*arguments)
        if code != 0:
            raise DriverError(f"{function} answers {code}")
