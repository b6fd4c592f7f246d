"""Functions that gate the heads of attention, as data: imports no torch."""

from enum import Enum


class GateFunction(Enum):
    """The function of a product by which a head's result is multiplied."""

    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"
