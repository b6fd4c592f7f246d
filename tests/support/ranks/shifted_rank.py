"""A rank like that of `ranks_follower.py`, whose part of each layer's queries begins one row late."""

from dataclasses import replace

from kernels.linear.weights import PlainWeight
from server.model.layers import LayerWeights, Weights
from support.ranks import ranks_follower


def shifted(weights: Weights) -> Weights:
    """Return weights whose products of queries, keys and values are of the rows behind theirs."""

    def changed(layer: LayerWeights) -> LayerWeights:
        qkv, _ = layer.mixed_by
        values = qkv.weight.dequantized().roll(-1, 0)
        return replace(layer, qkv=replace(qkv, weight=PlainWeight(values.to(weights.embedding.dtype))))

    return replace(weights, layers=tuple(map(changed, weights.layers)))


def main() -> None:
    ranks_follower.main(shifted)


if __name__ == "__main__":
    main()
