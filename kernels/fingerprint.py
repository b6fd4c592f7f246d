"""The machine and its software stack as data. Any difference makes evidence stale."""

from dataclasses import dataclass, fields
from enum import Enum


class Device(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    INTERPRETER = "interpreter"  # Triton's interpreter on the CPU: for tests of the Triton paths only


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a proof depends on besides the kernel's own source (which the evidence carries as `source_digest`)."""

    device: Device
    gpu: str  # marketing name; the processor's name on a CPU
    sm: int | None  # 90 for compute capability 9.0; None on a CPU
    driver: str | None
    cuda: str | None  # the version torch was built for
    cudnn: str | None
    torch: str
    triton: str | None  # None where triton is not installed (it exists for Linux only)

    def differing_fields(self, other: "Fingerprint") -> tuple[str, ...]:
        """Names of the fields in which two machines differ, in declaration order."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))

    def __str__(self) -> str:
        return " ".join(f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self))


def _text(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)
