"""Wrong products with weights, of experts, and wrong routes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.experts.kinds import RoutingConfig
from kernels.fused.activation_kind import Activation
from kernels.linear.weights import PlainWeight
from qualification.model.config import DenseConfig, ExpertsConfig, LayerConfig, ModelConfig
from served_faults.plant import Fault, Kind, Model, Plant, RunExperts, RunProduct
from server.model.decoder import Decoder, Operators
from server.model.layers import MixtureWeights, Weights
from server.model.ranks import Ranks


def _reading(change: Callable[[Tensor], Tensor]) -> Callable[[], Plant]:
    def wrong(run: RunProduct) -> RunProduct:
        return lambda x, *others: run(change(x), *others)

    return lambda: Plant(product=wrong)


def _writing(change: Callable[[Tensor], object]) -> Callable[[], Plant]:
    def wrong(run: RunProduct) -> RunProduct:
        def multiply(*given: Any) -> None:
            run(*given)
            change(given[-1])

        return multiply

    return lambda: Plant(product=wrong)


def _tf32(x: Tensor) -> Tensor:
    """Cut x to the 10 bits of fraction that TF32 has."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _gelu(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    layers = tuple(
        replace(it, feed_forward=replace(it.feed_forward, activation=Activation.GELU_TANH))
        if isinstance(it.feed_forward, DenseConfig)
        else it
        for it in config.layers
    )
    return replace(config, layers=layers), weights


def _row_two(out: Tensor) -> None:
    if out.shape[0] > 2:
        out[2] *= 1.001


def _three_rows(out: Tensor) -> None:
    if out.shape[0] == 3:
        out *= 1.01


def _visiting(change: Callable[[Tensor], Tensor]) -> Callable[[], Plant]:
    def wrong(run: RunExperts) -> RunExperts:
        return lambda hidden, experts, *others: run(hidden, change(experts), *others)

    return lambda: Plant(experts=wrong)


def _adding(run: RunExperts) -> RunExperts:
    def compute(*given: Any) -> None:
        run(*given)
        given[-1].mul_(1.001)

    return compute


def _first_two_swapped(experts: Tensor) -> Tensor:
    return torch.where(experts < 2, 1 - experts, experts)


def _next(experts: Tensor) -> Tensor:
    return (experts + 1) % NUM_EXPERTS


def _routing(change: Callable[[RoutingConfig], RoutingConfig]) -> Callable[[], Plant]:
    """Have layers route by another configuration; their experts are those of the plan."""

    def make(config: ModelConfig, weights: Weights, ranks: Ranks, operators: Operators) -> Decoder:
        planned: dict[ExpertsConfig, ExpertsConfig] = {}

        def changed(layer: LayerConfig) -> LayerConfig:
            own = layer.feed_forward
            if not isinstance(own, ExpertsConfig):
                return layer
            found = replace(own, routing=change(own.routing))
            planned[found] = own
            return replace(layer, feed_forward=found)

        layers = tuple(map(changed, config.layers))
        of_plan = replace(operators, experts=lambda it, of_experts: operators.experts(planned[it], of_experts))
        return Decoder(replace(config, layers=layers), weights, ranks, of_plan)

    return lambda: Plant(decoder=make)


def _mixtures(change: Callable[[MixtureWeights], MixtureWeights]) -> Callable[[], Plant]:
    def model(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
        layers = tuple(
            replace(it, feed_forward=change(it.feed_forward)) if isinstance(it.feed_forward, MixtureWeights) else it
            for it in weights.layers
        )
        return config, replace(weights, layers=layers)

    return lambda: Plant(model=model)


def _without_correction(weights: MixtureWeights) -> MixtureWeights:
    assert weights.correction_bias is not None
    return replace(weights, correction_bias=torch.zeros_like(weights.correction_bias))


def _rows_moved(weights: MixtureWeights) -> MixtureWeights:
    values = weights.router.weight.dequantized().float().roll(1, 0)
    return replace(weights, router=replace(weights.router, weight=PlainWeight(values)))


NUM_EXPERTS = 12
_MIXTURE: Any = {"model": Model.MIXTURE}

PRODUCT_FAULTS = (
    Fault("x in bf16", Kind.PRODUCTS, _reading(lambda x: x.bfloat16().to(x.dtype))),
    Fault("x in tf32", Kind.PRODUCTS, _reading(_tf32)),
    Fault("product x 1.001", Kind.PRODUCTS, _writing(lambda out: out.mul_(1.001))),
    Fault("last column 0", Kind.PRODUCTS, _writing(lambda out: out[:, -1].zero_())),
    Fault("gelu for silu", Kind.PRODUCTS, lambda: Plant(model=_gelu)),
    Fault("row 2 of batches x 1.001", Kind.PRODUCTS, _writing(_row_two)),
    Fault("products of exactly 3 rows x 1.01", Kind.PRODUCTS, _writing(_three_rows)),
    Fault("experts 0 and 1 swapped", Kind.EXPERTS, _visiting(_first_two_swapped), **_MIXTURE),
    Fault("experts x 1.001", Kind.EXPERTS, lambda: Plant(experts=_adding), **_MIXTURE),
    Fault("weights of experts x 0.9", Kind.ROUTER, _routing(lambda it: replace(it, scale=it.scale * 0.9)), **_MIXTURE),
    Fault(
        "weights of experts not renormalised",
        Kind.ROUTER,
        _routing(lambda it: replace(it, renormalizes=False)),
        **_MIXTURE,
    ),
    Fault("the next expert", Kind.ROUTER, _visiting(_next), **_MIXTURE),
)
OWN_PRODUCT_FAULTS = (
    Fault("one group of experts more", Kind.ROUTER, _routing(lambda it: replace(it, num_active_groups=3)), **_MIXTURE),
    Fault("correction bias of the router dropped", Kind.ROUTER, _mixtures(_without_correction), **_MIXTURE),
    Fault("router's rows moved by one", Kind.ROUTER, _mixtures(_rows_moved), **_MIXTURE),
)
