"""The machine and its software stack as data. Any difference makes evidence stale."""

from dataclasses import MISSING, dataclass, fields
from enum import Enum


class Device(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    INTERPRETER = "interpreter"  # Triton's interpreter on the CPU: for tests of the Triton paths only


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The machine that a proof holds for; the kernel's own source is `source_digest` of the evidence."""

    device: Device
    gpu: str  # marketing name; the processor's name on a CPU
    sm: int | None  # 90 for compute capability 9.0; None on a CPU
    driver: str | None
    cuda: str | None  # the version torch was built for
    cudnn: str | None
    torch: str
    triton: str | None  # None where triton is not installed (it exists for Linux only)
    # Of a CPU only, None on a GPU: each of these changes the bits or the speed of the same call on the same processor.
    instruction_set: str | None = None  # the best that torch's own kernels use, e.g. AVX2, AVX512, DEFAULT
    libraries: str | None = None  # settings of MKL, oneDNN and torch's matmul that are not the default, else "default"
    threads: int | None = None  # that torch computes one operation with

    def differing_fields(self, other: "Fingerprint") -> tuple[str, ...]:
        """Names of the fields in which two machines differ, in declaration order."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))

    def values(self) -> dict[str, str | int | None]:
        """Every field as a plain value by its name, without those of a CPU where they are None.

        A GPU's matrix files and the names of its cache files are made from this, so they stay as they are when CPUs get
        another field.
        """
        named = ((f, getattr(self, f.name)) for f in fields(self))
        return {
            f.name: value.value if isinstance(value, Enum) else value
            for f, value in named
            if f.default is MISSING or value is not None
        }

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values().items())
