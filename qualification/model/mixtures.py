"""Mixtures of experts in config.json: their routing, and which layers have one."""

from collections.abc import Callable

from kernels.experts.kinds import RoutingConfig, Scores
from qualification.model.config import ExpertsConfig, FeedForward, SharedExpertConfig
from qualification.model.fields import Fields
from qualification.model.shared import read_activation, read_dense
from qualification.model.windows import read_num_layers


def read_mixtures(
    fields: Fields, read_experts: Callable[[Fields], ExpertsConfig], has_experts: Callable[[int], bool]
) -> tuple[FeedForward, ...]:
    """The feed-forward of each layer: a mixture where `has_experts`, else a dense one. Raises ModelConfigError."""
    are_mixtures = [has_experts(layer) for layer in range(read_num_layers(fields))]
    # The fields of a kind that no layer has may be missing.
    of_kind: dict[bool, FeedForward] = {
        is_mixture: read_experts(fields) if is_mixture else read_dense(fields) for is_mixture in set(are_mixtures)
    }
    return tuple(of_kind[is_mixture] for is_mixture in are_mixtures)


def read_mixtures_behind(
    fields: Fields, read_experts: Callable[[Fields], ExpertsConfig], *, num_dense_missing: int
) -> tuple[FeedForward, ...]:
    """The feed-forward of each layer: a mixture behind the dense ones that first_k_dense_replace counts.

    num_dense_missing  the count where the field is missing. Raises ModelConfigError.
    """
    num_dense = fields.count("first_k_dense_replace", num_dense_missing)
    return read_mixtures(fields, read_experts, lambda layer: layer >= num_dense)


KINDS = "mlp_layer_types"  # the field with the kind of each layer's feed-forward
_MIXTURE, _DENSE = "sparse", "dense"


def read_mixtures_by_kind(
    fields: Fields, read_experts: Callable[[Fields], ExpertsConfig], *, num_dense_missing: int
) -> tuple[FeedForward, ...]:
    """The feed-forward of each layer, of the kind that mlp_layer_types names. Raises ModelConfigError.

    num_dense_missing  the first layers that are dense where the field is missing
    """
    num_layers = read_num_layers(fields)
    kinds = tuple(_DENSE if layer < num_dense_missing else _MIXTURE for layer in range(num_layers))
    if fields.has(KINDS):
        kinds = fields.choices(KINDS, (_MIXTURE, _DENSE), num_layers)
    return read_mixtures(fields, read_experts, lambda layer: kinds[layer] == _MIXTURE)


def read_routing(
    fields: Fields,
    num_experts: str,
    *,
    scores: Scores = Scores.SOFTMAX,
    renormalizes: bool,
    has_groups: bool = False,
    scale: float = 1.0,
    num_experts_missing: int | None = None,
    num_active_missing: int | None = None,
    num_active: str = "num_experts_per_tok",
) -> RoutingConfig:
    """num_experts, num_active   the fields with the numbers of experts, and of a token's. Raises ModelConfigError."""
    count = fields.integer(num_experts, num_experts_missing)
    num_groups = fields.integer("n_group", 1) if has_groups else 1
    if count % num_groups or (num_groups > 1 and count // num_groups < 2):
        fields.refuse("n_group", f"a number of groups of {num_experts} ({count}), of two or more each")
    num_active_groups = fields.integer("topk_group", 1, most=num_groups) if has_groups else 1
    most = count // num_groups * num_active_groups
    active = fields.integer(num_active, num_active_missing, most=most)
    return RoutingConfig(count, active, scores, renormalizes, num_groups, num_active_groups, scale)


def read_deepseek_experts(
    fields: Fields,
    *,
    scores: Scores = Scores.SOFTMAX,
    renormalizes: bool = True,
    has_groups: bool = True,
    scale: float = 1.0,
    width: int,
    num_shared: int = 1,
    num_experts: int,
    num_active: int | None,
) -> ExpertsConfig:
    """DeepSeek's: beside experts that all tokens visit as one; sigmoids have a bias. Raises ModelConfigError.

    The numbers are those of the family's class in transformers, where the fields are missing.
    """
    width, num_shared = fields.integer("moe_intermediate_size", width), fields.count("n_shared_experts", num_shared)
    routing = read_routing(
        fields,
        "n_routed_experts",
        scores=scores,
        # Null is false, where the class takes it.
        renormalizes=fields.where_absent(norm_topk_prob=renormalizes).flag("norm_topk_prob", False),
        has_groups=has_groups,
        scale=fields.number("routed_scaling_factor", scale),
        num_experts_missing=num_experts,
        num_active_missing=num_active,
    )
    return ExpertsConfig(
        width,
        routing,
        read_activation(fields),
        has_correction_bias=scores is Scores.SIGMOID,
        shared=SharedExpertConfig(width * num_shared) if num_shared else None,
    )


def read_qwen_mixtures(
    fields: Fields, *, num_experts: int, num_active: int, width: int, shared_width: int | None = None
) -> tuple[FeedForward, ...]:
    """Qwen's: in each decoder_sparse_step-th layer that mlp_only_layers does not name. Raises ModelConfigError.

    The numbers are those of the family's class in transformers, where the fields are missing; shared_width: that of an
    expert that all tokens visit, gated, None for a family without one.
    """
    dense_layers = fields.indices("mlp_only_layers", read_num_layers(fields))
    step = fields.integer("decoder_sparse_step", 1)

    def read_experts(fields: Fields) -> ExpertsConfig:
        read_activation(fields)
        shared = None
        if shared_width is not None:
            shared = SharedExpertConfig(fields.integer("shared_expert_intermediate_size", shared_width), is_gated=True)
        routing = read_routing(
            fields,
            "num_local_experts" if fields.has("num_local_experts") else "num_experts",  # as newer files call them
            renormalizes=fields.flag("norm_topk_prob", False),
            num_experts_missing=num_experts,
            num_active_missing=num_active,
        )
        return ExpertsConfig(fields.integer("moe_intermediate_size", width), routing, shared=shared)

    return read_mixtures(fields, read_experts, lambda layer: layer not in dense_layers and (layer + 1) % step == 0)
