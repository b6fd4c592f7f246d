"""The CUDA driver's functions on graphs, called by ctypes: PyTorch offers none of them."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
# Other nodes of CUgraphNodeType by what a reader calls them. None: nothing runs on the device.
_OTHER_NODES: Mapping[int, str | None] = MappingProxyType(
    {
        **{1: "Memcpy", 2: "Memset", 3: "host function", 4: "child graph", 5: None, 6: None, 7: None},
        12: "Memset of words, and waits for them",  # CU_GRAPH_NODE_TYPE_BATCH_MEM_OP
    }
)


class DriverError(RuntimeError):
    """The CUDA driver does not say what was captured, or how long it took."""


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2. Source: the CUDA driver API's documentation."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),  # grid, block, shared bytes
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData: how a node depends on another one; all zeros: it begins when that one is done."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("kind", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


@dataclass(frozen=True, slots=True)
class Edges:
    """Every dependency of a graph: `pairs` of (node, the node that waits for it), and the driver's own arrays."""

    pairs: tuple[tuple[int, int], ...]
    arrays: "tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p], ctypes.Array[EdgeData]]"


class CudaDriver:
    """Handles of graphs, nodes, events and streams are the driver's pointers as integers. Every call may raise
    DriverError.
    """

    def __init__(self) -> None:
        """Load the driver's library. Raises DriverError where there is none."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"the CUDA driver's library cannot be loaded: {error}") from error

    def captured_graph(self, stream: int) -> int:
        """Return the graph that `stream` is being captured into."""
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
        return graph.value

    def nodes(self, graph: int) -> list[int]:
        """Return the nodes of a graph, as a rule in the order of their capture."""
        num_nodes = ctypes.c_size_t()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(num_nodes))
        nodes = (ctypes.c_void_p * num_nodes.value)()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(num_nodes))
        return [node for node in nodes if node is not None]

    def node_name(self, node: int) -> str | None:
        """Return the name of a node's kernel, or what else the node is; None where it does nothing on the device."""
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != _KERNEL_NODE:
            return _OTHER_NODES.get(kind.value, f"graph node of kind {kind.value}")
        params, name = KernelParams(), ctypes.c_char_p()
        self._call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
        if params.func:
            self._call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
        else:
            self._call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kern))
        return (name.value or b"").decode()

    def clone(self, graph: int) -> int:
        """Return a copy of a graph, to be given to `destroy_graph`."""
        copy = ctypes.c_void_p()
        self._call("cuGraphClone", ctypes.byref(copy), ctypes.c_void_p(graph))
        return copy.value or 0

    def edges(self, graph: int) -> Edges:
        num_edges = ctypes.c_size_t()
        self._call("cuGraphGetEdges_v2", ctypes.c_void_p(graph), None, None, None, ctypes.byref(num_edges))
        size = num_edges.value
        arrays = (ctypes.c_void_p * size)(), (ctypes.c_void_p * size)(), (EdgeData * size)()
        self._call("cuGraphGetEdges_v2", ctypes.c_void_p(graph), *arrays, ctypes.byref(num_edges))
        return Edges(tuple(zip(_values(arrays[0]), _values(arrays[1]), strict=True)), arrays)

    def remove_edges(self, graph: int, edges: Edges) -> None:
        """Remove all dependencies that `edges` of this graph returned."""
        if edges.pairs:
            size = ctypes.c_size_t(len(edges.pairs))
            self._call("cuGraphRemoveDependencies_v2", ctypes.c_void_p(graph), *edges.arrays, size)

    def add_edge(self, graph: int, node: int, waiting: int) -> None:
        """Let the node `waiting` begin when `node` is done."""
        pair = ctypes.c_void_p(node), ctypes.c_void_p(waiting)
        self._call(
            "cuGraphAddDependencies_v2",
            ctypes.c_void_p(graph),
            ctypes.byref(pair[0]),
            ctypes.byref(pair[1]),
            None,
            ctypes.c_size_t(1),
        )

    def add_event_node(self, graph: int, after: Sequence[int], event: int) -> int:
        """Add a node that records `event` when all nodes of `after` are done; without any, when the graph begins."""
        node, dependencies = ctypes.c_void_p(), (ctypes.c_void_p * len(after))(*after)
        self._call(
            "cuGraphAddEventRecordNode",
            ctypes.byref(node),
            ctypes.c_void_p(graph),
            dependencies,
            ctypes.c_size_t(len(after)),
            ctypes.c_void_p(event),
        )
        return node.value or 0

    def instantiate(self, graph: int) -> int:
        """Return what can be launched, to be given to `destroy_executable`."""
        executable = ctypes.c_void_p()
        self._call(
            "cuGraphInstantiateWithFlags", ctypes.byref(executable), ctypes.c_void_p(graph), ctypes.c_ulonglong(0)
        )
        return executable.value or 0

    def launch(self, executable: int, stream: int) -> None:
        """Launch an instantiated graph and wait for the stream."""
        self._call("cuGraphLaunch", ctypes.c_void_p(executable), ctypes.c_void_p(stream))
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def create_event(self) -> int:
        """Return an event that measures time, to be given to `destroy_event`."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        return event.value or 0

    def seconds_between(self, begin: int, end: int) -> float:
        """Return the time between two recorded events."""
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), ctypes.c_void_p(begin), ctypes.c_void_p(end))
        return milliseconds.value / 1e3

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def destroy_executable(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", ctypes.c_void_p(executable))

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphDestroy", ctypes.c_void_p(graph))

    def _call(self, function: str, *arguments: object) -> None:
        if not hasattr(self._library, function):
            raise DriverError(f"this driver has no {function}")
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            raise DriverError(f"{function} answers {code}")


def _values(pointers: "ctypes.Array[ctypes.c_void_p]") -> Iterator[int]:
    return (pointer or 0 for pointer in pointers)  # ctypes gives integers
