"""The weights of a decoder, merged as its matmuls want them."""

from dataclasses import dataclass, replace

from torch import Tensor

from kernels.experts.bit_order import order_
from kernels.experts.few_bits.weights import AnyExperts, FewBitExperts
from kernels.experts.weights import ExpertWeights, Mxfp4Weights
from kernels.linear.weights import PlainWeight
from qualification.model.config import ExpertsConfig, LayerConfig
from server.model.linear import Linear, WeightName


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A feed-forward that all tokens visit."""

    gate_up: Linear  # gate, then up; up alone where there is no gate
    down: Linear
    xielu: "XieluWeights | None" = None


@dataclass(frozen=True, slots=True)
class XieluWeights:
    """The numbers of an xIELU: alpha_p and alpha_n [1] before their softplus, beta and eps []."""

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor

    @property
    def stored(self) -> dict[str, Tensor]:
        """Return them by their names in a checkpoint."""
        return {"alpha_p": self.alpha_p, "alpha_n": self.alpha_n, "beta": self.beta, "eps": self.eps}


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A feed-forward of experts.

    router           [experts, hidden]; behind these the gate of what all tokens visit, where that is one more expert,
                     and then rows of zeros
    correction_bias  [experts] fp32 or None
    shared           what all tokens visit beside their experts, or None where nothing is, or it is one of them
    shared_gate      [1, hidden], or None where `shared` is not gated
    expert_scales    [experts] fp32 or None
    norms            None where router, experts and `shared` read the same
    to_latent        [latent, hidden], of what experts read, and from_latent [hidden, latent], of what they add; None
                     where they read and add hidden numbers
    """

    router: Linear
    experts: AnyExperts
    correction_bias: Tensor | None = None
    shared: DenseWeights | None = None
    shared_gate: Tensor | None = None
    expert_scales: Tensor | None = None
    norms: "NormsApart | None" = None
    to_latent: Linear | None = None
    from_latent: Linear | None = None

    def as_published(self, config: ExpertsConfig) -> "MixtureWeights":
        """Return views of the tensors as a checkpoint has them: what all tokens visit, and its gate, apart."""
        if self.shared is not None or not config.shared_is_expert:
            return self
        count, router, experts = config.num_experts, self.router.weight, self.experts
        assert isinstance(router, PlainWeight), "a router is"
        if isinstance(experts, FewBitExperts):
            gate_up, down = experts.weights_of(count)
            rows = count * gate_up.size[0], count * down.size[0]
            others: AnyExperts = replace(
                experts, gate_up=experts.gate_up.rows(0, rows[0]), down=experts.down.rows(0, rows[1])
            )
            shared = DenseWeights(Linear(gate_up), Linear(down))
        else:
            assert isinstance(experts, ExpertWeights), "what all tokens visit is no expert in mxfp4"
            others = replace(experts, gate_up=experts.gate_up[:count], down=experts.down[:count])
            of_all = Linear(PlainWeight(experts.gate_up[count])), Linear(PlainWeight(experts.down[count]))
            shared = DenseWeights(*of_all)
        return replace(
            self,
            router=Linear(router.rows(0, count)),
            experts=others,
            shared=shared,
            shared_gate=router.values[count : count + 1],
        )

    @property
    def linears(self) -> dict[WeightName, Linear]:
        """Return the products that all tokens visit, in the order in which they are computed."""
        found = {WeightName.ROUTER: self.router}
        if self.to_latent is not None and self.from_latent is not None:
            found |= {WeightName.TO_LATENT: self.to_latent, WeightName.FROM_LATENT: self.from_latent}
        if self.shared is not None:
            found |= {WeightName.SHARED_GATE_UP: self.shared.gate_up, WeightName.SHARED_DOWN: self.shared.down}
        return found


@dataclass(frozen=True, slots=True)
class NormsApart:
    """Norms [hidden] of a mixture whose parts read the residual, each by a norm of its own.

    router   of what the router reads, still to be divided by sqrt(hidden)
    experts  of what experts read; what all tokens visit reads by the layer's norm
    after_experts, after_shared  of what both add
    """

    router: Tensor
    experts: Tensor
    after_experts: Tensor
    after_shared: Tensor


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """Embeddings of tokens for each layer.

    embedding  [vocab, layers * width]
    product    [layers * width, hidden], of a token's embedding
    norm       [width], of each layer's part of that product
    """

    embedding: Tensor
    product: Linear
    norm: Tensor


@dataclass(frozen=True, slots=True)
class PerLayerGateWeights:
    """A layer's part: gate [width, hidden], output [hidden, width], and the norm [hidden] of what it adds."""

    gate: Linear
    output: Linear
    norm: Tensor


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """Tensors of a layer of a delta rule, of a state space or of lightning attention, beside what others have too.

    gates    [2 * value heads, hidden]: of writing, then of decay. Where channels have decays
             [value heads + 2 * value dim, hidden]: of writing, then what `decays` and `output_gates` read. None without
             such gates, and where they are the last rows of the layer's `qkv`
    decays   [value heads * key dim, value dim], output_gates [value heads * value dim, value dim]; else None
    conv     [channels, 1, width]: of queries, keys and values before they are mixed; none of lightning attention
    a_log    [value heads] fp32, of the decay, which no checkpoint of lightning attention has; dt_bias likewise, or a
             number for each channel of a key
    norm     [value dim] fp32, of the result; of all heads where groups of them are normed; [0] where it is not normed
    conv_bias, skip   [channels], and [value heads] fp32: of a state space, else None
    """

    gates: Linear | None
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    conv_bias: Tensor | None = None
    skip: Tensor | None = None
    decays: Linear | None = None
    output_gates: Linear | None = None

    @property
    def linears(self) -> dict[WeightName, Linear]:
        """Return the products of these tensors, in the order in which they are computed."""
        names = {
            WeightName.RECURRENT_GATES: self.gates,
            WeightName.RECURRENT_DECAYS: self.decays,
            WeightName.RECURRENT_OUTPUT_GATES: self.output_gates,
        }
        return {name: linear for name, linear in names.items() if linear is not None}


@dataclass(frozen=True, slots=True)
class ConvolutionTensors:
    """Tensors of a layer of a short convolution beside its products: taps [channels, 1, width], bias [channels]."""

    taps: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Tensors of what chooses the keys of a layer with latent attention.

    queries  [heads * dim, query latent]
    key      [dim, hidden], and the weight and the bias [dim] of its LayerNorm
    weights  [heads, hidden], never in another format than the model's dtype
    """

    queries: Linear
    key: Linear
    norm: Tensor
    bias: Tensor
    weights: Linear


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Tensors of latent attention beside the first and the last product.

    query_norm  [query latent], query_up its product; None where queries are made without a latent
    norm        [latent]
    kv_up       [heads * (plain + value), latent]: of each head what makes keys, then what makes values. No step
                multiplies with it: a decoder has its parts as matrices of heads, in the dtype of the model
    indexer     None where the layer chooses no keys
    """

    query_norm: Tensor | None
    query_up: Linear | None
    norm: Tensor
    kv_up: Linear
    indexer: IndexerWeights | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer. A norm is [hidden], as the checkpoint has it, or None where the layer has none.

    qkv              query heads, then key heads, then value heads; before them the gates of attention's result, where
                     it has such, and behind them those of a recurrence's, and its other gates where `recurrence` has
                     none of their own; None, like `output`, without a mixer
    recurrence       of a layer of the gated delta rule; None of others
    convolution      of a layer of a short convolution, whose `qkv` has its gates and inputs; None of others
    scale    [1]: what the residual behind the layer is multiplied by; None: by nothing
    attention_norm_bias, feed_forward_norm_bias   [hidden]: of LayerNorms that add one; else None
    q_norm, k_norm   [head_dim], or as many numbers as all heads have
    attention_gate   a number for each head, or for each of their dimensions
    sinks            [heads] fp32: a logit for each head that joins the softmax and has no value
    beside           a layer of the recurrence beside attention alone; None without one
    """

    attention_norm: Tensor | None
    qkv: Linear | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear | None
    feed_forward_norm: Tensor | None
    feed_forward: DenseWeights | MixtureWeights | None
    norm_after_attention: Tensor | None = None
    norm_after_feed_forward: Tensor | None = None
    sinks: Tensor | None = None
    attention_gate: Linear | None = None
    recurrence: GatedDeltaWeights | None = None
    convolution: ConvolutionTensors | None = None
    latent: LatentWeights | None = None
    per_layer: PerLayerGateWeights | None = None
    scale: Tensor | None = None
    attention_norm_bias: Tensor | None = None
    feed_forward_norm_bias: Tensor | None = None
    beside: "LayerWeights | None" = None

    def as_published(self, config: LayerConfig) -> "LayerWeights":
        """Return the same layer, its mixture as a checkpoint has it."""
        if not isinstance(self.feed_forward, MixtureWeights) or not isinstance(config.feed_forward, ExpertsConfig):
            return self
        return replace(self, feed_forward=self.feed_forward.as_published(config.feed_forward))

    @property
    def mixed_by(self) -> tuple[Linear, Linear]:
        """Return `qkv` and `output`; no layer without a mixer may be asked."""
        assert self.qkv is not None, "the layer has a mixer"
        assert self.output is not None, "the layer has a mixer"
        return self.qkv, self.output

    @property
    def linears(self) -> dict[WeightName, Linear]:
        """Return the products that all tokens visit, in the order in which they are computed."""
        fed: dict[WeightName, Linear] = {}
        match self.feed_forward:
            case DenseWeights(gate_up, down):
                fed = {WeightName.GATE_UP: gate_up, WeightName.DOWN: down}
            case MixtureWeights() as mixture:
                fed = mixture.linears
        if self.qkv is None:
            return fed
        qkv, output = self.mixed_by
        gate = {} if self.attention_gate is None else {WeightName.ATTENTION_GATE: self.attention_gate}
        if self.recurrence is not None:
            return {
                WeightName.RECURRENT_INPUT: qkv,
                **self.recurrence.linears,
                WeightName.RECURRENT_OUTPUT: output,
                **fed,
            }
        if self.convolution is not None:
            return {WeightName.RECURRENT_INPUT: qkv, WeightName.RECURRENT_OUTPUT: output, **fed}
        up = {} if self.latent is None or self.latent.query_up is None else {WeightName.QUERY_UP: self.latent.query_up}
        if self.latent is not None and (own := self.latent.indexer) is not None:
            up |= {
                WeightName.INDEX_QUERIES: own.queries,
                WeightName.INDEX_KEY: own.key,
                WeightName.INDEX_WEIGHTS: own.weights,
            }
        beside = {} if self.beside is None else self.beside.linears
        found = {WeightName.QKV: qkv, **up, **gate, WeightName.OUTPUT: output, **beside, **fed}
        if self.per_layer is not None:
            found |= {
                WeightName.PER_LAYER_GATE: self.per_layer.gate,
                WeightName.PER_LAYER_OUTPUT: self.per_layer.output,
            }
        return found


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The weights of a draft head beside its layer.

    embedding_norm, hidden_norm, norm   [hidden], of a token's embedding, of the model's output, and behind the layer
    product  [hidden, 2 x hidden]: of both, the embedding first
    """

    embedding_norm: Tensor
    hidden_norm: Tensor
    product: Linear
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Linear  # [vocab, hidden]; its weight is the embedding itself where they are tied
    per_layer: PerLayerWeights | None = None
    draft: DraftWeights | None = None  # of the head whose layer is the last one of `layers`
    final_norm_bias: Tensor | None = None  # [hidden], of a LayerNorm that adds one
    head_bias: Tensor | None = None  # [vocab], whole on every rank, added to the logits
    positions: Tensor | None = None  # [rows, hidden], of a model that has learned its positions

    def order_codes_(self) -> None:
        """Put the blocks of mixtures in mxfp4, as a checkpoint has them, into the order of `Mxfp4Weights`, in place."""
        for layer in self.layers:
            if isinstance(layer.feed_forward, MixtureWeights) and isinstance(layer.feed_forward.experts, Mxfp4Weights):
                order_(layer.feed_forward.experts.gate_up_blocks)
                order_(layer.feed_forward.experts.down_blocks)

    def inspected(self) -> "Weights":
        """The same, mixtures in mxfp4 with what their scales allow, those of all layers alike: they share kernels.

        No weight may change any more. Waits for the device.
        """
        mixtures = [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MixtureWeights)]
        codes = [it.experts for it in mixtures if isinstance(it.experts, Mxfp4Weights)]
        large = any(it.inspected().has_large_scales for it in codes)

        def known(layer: LayerWeights) -> LayerWeights:
            fed = layer.feed_forward
            if not isinstance(fed, MixtureWeights) or not isinstance(fed.experts, Mxfp4Weights):
                return layer
            return replace(layer, feed_forward=replace(fed, experts=replace(fed.experts, has_large_scales=large)))

        return replace(self, layers=tuple(map(known, self.layers)))
