"""A rank like that of `ranks_follower.py`, whose part of what layers add is zero."""

from dataclasses import replace

import torch

from kernels.linear.weights import PlainWeight
from server.model.layers import LayerWeights, Weights
from support.ranks import ranks_follower


def silent(weights: Weights) -> Weights:
    """Return weights whose products behind attention are zero."""

    def changed(layer: LayerWeights) -> LayerWeights:
        assert layer.output is not None
        values = torch.zeros(layer.output.weight.size, dtype=weights.embedding.dtype)
        return replace(layer, output=replace(layer.output, weight=PlainWeight(values)))

    return replace(weights, layers=tuple(map(changed, weights.layers)))


def main() -> None:
    ranks_follower.main(silent)


if __name__ == "__main__":
    main()
