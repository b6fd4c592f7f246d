"""Stands in for the driver of an sm_90 GPU: enough of one to compile for, or to record what would be launched."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget


class Hopper:
    """Driver with what a compilation asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments of a launch, and how many the launcher takes; constants stand where nothing is given."""

    name: str
    grid: tuple[int, ...]
    cluster: int
    is_dependent: bool
    taken: int
    given: tuple[Any, ...]


class Launcher:
    """Stands in for Triton's launcher: keeps every launch."""

    launches: list[Launch] = []  # noqa: RUF012 -- of the program

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source, self.metadata = source, metadata

    def __call__(self, *arguments: Any) -> None:
        """Launch as Triton's binder does."""
        self._keep(arguments[:3], 1, arguments[9:])

    def launch(self, *arguments: Any) -> None:
        """Triton's compiled launcher: takes four arguments more before the kernel's."""
        constants = self.source.constants
        given = tuple(constants.get((at,), value) for at, value in enumerate(arguments[13:]))
        self._keep(arguments[:3], arguments[9][1], given)

    def _keep(self, grid: tuple[int, ...], cluster: int, given: tuple[Any, ...]) -> None:
        is_dependent, taken = self.metadata.launch_pdl, len(self.source.signature)
        self.launches.append(Launch(self.source.fn.__name__, grid, cluster, is_dependent, taken, given))


class Recording(Hopper):
    most_clusters = 7  # that have room at once

    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 2, 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232_448},
        fill_tma_descriptor=lambda address, *_: address,
        cuOccupancyMaxActiveClusters=lambda _function, _bytes, cluster: Recording.clusters_of(cluster),
    )

    @classmethod
    def clusters_of(cls, cluster: int) -> int:
        """Return the clusters that fit; a slice of a GPU without room for 8 programs has no larger ones."""
        if cluster > 8 and not cls.most_clusters:
            raise RuntimeError("Triton Error [CUDA]: cluster misconfiguration")
        return cls.most_clusters
