"""The parts of a step. The engine and its runner mark where they are, for a bench that times the parts."""

from collections.abc import Callable
from enum import Enum


class Part(Enum):
    """Parts of a step in their order. The values are names in the files of `hallmark bench steps`."""

    PLAN = "plan"  # choose the tokens of the step, and their pages
    FILL = "fill"  # write the batch into the step's input tensors
    LAUNCH = "launch"  # choose and count paths, make sampling parameters, and all else of the runner
    FORWARD = "forward"  # the model; on a GPU its launch, by graph or kernel by kernel
    SAMPLE = "sample"  # logits and tokens, likewise
    WAIT = "wait"  # until the device has computed the tokens
    REPORT = "report"  # write the tokens into sequences and messages


Mark = Callable[[Part], None]  # the stepping thread is at this part from now on


def unmarked(_part: Part) -> None:
    """The mark of a server, which times no parts."""
