"""A model's architecture as data, layer by layer, whatever its family."""

import math
from dataclasses import dataclass
from enum import Enum

from kernels.experts.formats import AnyExpertFormat, FewBitFormat
from kernels.experts.kinds import MXFP4_BLOCK, ExpertFormat, RoutingConfig
from kernels.experts.shape import AnyExpertActivation
from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.head_gate_kind import GateFunction
from kernels.fused.ungated_kind import Ungated
from kernels.linear.formats.int4_formats import bytes_of
from kernels.linear.shape import FP8_ROWS, PLAIN, WeightFormat
from kernels.vocabulary.cache_dtype import FP8, cached_bytes
from kernels.vocabulary.shape import Dtype
from kernels.vocabulary.value_shape import Values
from qualification.model.packing import Packing
from qualification.model.tower import TowerConfig


class RopeKind(Enum):
    NONE = "none"  # nothing is rotated: such a layer sees no positions
    PLAIN = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"  # of whole heads, whose frequencies are 0 beyond `rotated_share` of the pairs


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding with every default resolved; fields of other kinds than `kind` keep their defaults."""

    theta: float
    kind: RopeKind = RopeKind.PLAIN
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True  # the borders between the bands are whole dimensions
    attention_factor: float = 1.0  # of the cosines and sines
    short_factors: tuple[float, ...] = ()  # longrope: for models served up to their original context,
    long_factors: tuple[float, ...] = ()  # and for those served beyond it; one for each pair of dimensions
    rotated_share: float = 1.0  # of a head's dimensions: the first ones are rotated, the others left as they are
    position_parts: tuple[int, ...] = ()  # which of three positions rotates each pair of dimensions; (): there is one

    def longest_context(self, max_position: int) -> int:
        """Positions that the rotation is stretched to, of a model of `max_position`, as vLLM derives them."""
        match self.kind:
            case RopeKind.YARN:
                return max(max_position, int((self.original_max_position or max_position) * self.factor))
            case RopeKind.LINEAR:
                return max(max_position, int(max_position * self.factor))
            case RopeKind.NONE | RopeKind.PLAIN | RopeKind.LLAMA3 | RopeKind.LONGROPE | RopeKind.PROPORTIONAL:
                return max_position

    def rotated_dims(self, head_dim: int) -> int:
        """The dimensions of a head that are rotated, by an angle of 0 too, rounded down as in transformers."""
        return head_dim if self.kind is RopeKind.PROPORTIONAL else int(head_dim * self.rotated_share)


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries times 1 + rate * ln(1 + floor((position + first) / span)), behind the rotation."""

    rate: float
    span: int  # positions
    first: int = 0  # the number of the first position

    def is_one(self, max_position: int) -> bool:
        """Return whether no query of so many positions is changed."""
        return max_position - 1 + self.first < self.span


class QKNorm(Enum):
    """The RMSNorm of queries and keys, before the rotation unless the name says otherwise."""

    NONE = "none"
    EACH_HEAD = "each head"  # one weight of head_dim for all heads
    EACH_HEAD_ROTATED = "each head, rotated"  # of a head that is rotated already, which only changes its weight
    EACH_HEAD_UNWEIGHTED = "each head, unweighted"  # the checkpoint has no weight of it
    ALL_HEADS = "all heads"  # over all heads of a token together


@dataclass(frozen=True, slots=True)
class AttentionGate:
    """The factor of each head's result: a function of a product of what attention reads.

    by_dimension  whether each dimension of a head has a number of its own; else all of a head have one
    is_beside_queries  whether the product is part of that of the queries, and of its tensor, head by head
    """

    function: GateFunction
    by_dimension: bool = False
    is_beside_queries: bool = False


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """values_are_keys  no product makes values: they are the keys, before these are normed and rotated
    chunk            positions of a chunk, of which a token sees those of its own alone; None: there are none
    norms_values     an RMSNorm without weights of each head of the values
    reads_keys_of    the earlier layer, by its place among all, whose keys and values are read; None: the layer has its
                     own. One that reads another's has products of queries alone
    sees_spans       tokens of an image see each other both ways, in the window where there is one
    value_dim        numbers of a head's value; None: as many as of its key
    value_scale      what values are multiplied by behind their product
    output_scale     what its results are multiplied by behind the last product
    qkv_shards       shards in which a checkpoint has queries, keys and values as one tensor, in 8 bits: of each shard
                     the heads' queries, then their keys, then their values; None: it has them in another way
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    rope: RopeConfig
    window: int | None = None  # tokens that a token sees, itself included; None: all before it
    softcap: float | None = None
    has_sinks: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    has_bias: bool = False  # on q, k and v
    has_output_bias: bool = False
    query_scaling: QueryScaling | None = None
    gate: AttentionGate | None = None
    chunk: int | None = None
    values_are_keys: bool = False
    norms_values: bool = False
    reads_keys_of: int | None = None
    skips_fp8_cache: bool = False  # its keys and values stay in the model's dtype in a cache of 8 bits
    sees_spans: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0
    output_scale: float = 1.0
    qkv_shards: int | None = None

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def projected_size(self) -> int:
        """Return the rows of what makes queries, keys and values, as far as it does, and gates beside the queries."""
        has_gates = self.gate is not None and self.gate.is_beside_queries
        return sum(self.part_sizes) + has_gates * self.gate_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def value_size(self) -> int:
        return self.num_kv_heads * (self.value_dim or self.head_dim)

    @property
    def gate_size(self) -> int:
        """Return the numbers by which a token's heads are multiplied; 0 where there is no gate."""
        if self.gate is None:
            return 0
        return self.query_size if self.gate.by_dimension else self.num_heads

    @property
    def cached_dim(self) -> int:
        """Return the numbers of a head's key that a page holds of a token, with what lies behind it."""
        return self.head_dim

    @property
    def output_dim(self) -> int:
        """Return the numbers of a head that the last product reads."""
        return self.value_dim or self.head_dim

    @property
    def output_size(self) -> int:
        return self.num_heads * self.output_dim

    @property
    def rotary_dim(self) -> int:
        """Return the numbers of a head that the rotation is of."""
        return self.head_dim

    @property
    def values(self) -> Values | None:
        """Return the values that attention reads where they have another size than the keys; else None."""
        return None if self.value_dim is None or self.value_dim == self.head_dim else Values(self.value_dim)

    @property
    def is_latent(self) -> bool:
        """Return whether values are the first numbers of the keys."""
        return self.values is not None and self.values.is_latent

    @property
    def query_up_numbers(self) -> int:
        """Return the numbers of the product that makes queries of a latent; 0 where there is none."""
        return 0

    @property
    def kv_up_numbers(self) -> int:
        """Return the numbers of the product that makes keys and values of a latent; 0 where there is none."""
        return 0

    @property
    def reads_choice(self) -> bool:
        """Return whether a query attends to keys that an indexer chooses, of this layer or of an earlier one."""
        return self.values is not None and self.values.indexer is not None

    def indexer_numbers(self, hidden: int) -> tuple[int, int]:
        """Return the numbers of the products that make an indexer's queries and its key; `hidden`: of what it reads."""
        del hidden
        return 0, 0

    @property
    def has_own_keys(self) -> bool:
        return self.reads_keys_of is None

    def num_parameters(self, hidden: int) -> int:
        """Return the numbers of its weights in the checkpoint; `hidden`: of what it reads."""
        count = hidden * (self.projected_size + self.output_size)
        count += self.projected_size * self.has_bias + hidden * self.has_output_bias
        count += self.num_heads * self.has_sinks
        if self.gate is not None and not self.gate.is_beside_queries:
            count += hidden * self.gate_size
        match self.qk_norm:
            case QKNorm.EACH_HEAD | QKNorm.EACH_HEAD_ROTATED:
                count += (1 + self.has_own_keys) * self.head_dim
            case QKNorm.ALL_HEADS:
                count += self.query_size + self.kv_size
            case QKNorm.NONE | QKNorm.EACH_HEAD_UNWEIGHTED:
                pass
        return count

    @property
    def head_splits(self) -> tuple[int, ...]:
        """Heads that one product makes of each kind: queries, keys where it makes any, values where it makes any."""
        if not self.has_own_keys:
            return (self.num_heads,)
        return (self.num_heads, *((self.num_kv_heads,) if self.values_are_keys else (self.num_kv_heads,) * 2))

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Numbers of each kind that one product makes: of queries, of keys, of values."""
        dims = self.head_dim, self.head_dim, self.value_dim or self.head_dim
        return tuple(count * dim for count, dim in zip(self.head_splits, dims, strict=False))


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One of the tensors that a recurrence keeps of a sequence in one layer. dtype: None for that of the weights."""

    shape: tuple[int, ...]
    dtype: Dtype | None

    def num_bytes(self, dtype: Dtype) -> int:
        """Return its bytes where the weights are of `dtype`."""
        return math.prod(self.shape) * (self.dtype or dtype).num_bytes


@dataclass(frozen=True, slots=True)
class RecurrenceProducts:
    """Numbers of the weights of a recurrence's products: the first, the last, and that of gates beside the first."""

    first: int = 0
    output: int = 0
    gates: int = 0


@dataclass(frozen=True, slots=True)
class RecurrenceConfig:
    """A mixer that keeps a state of fixed size of each sequence, and no keys and values; each kind is a class below it.

    name            of the kind, for messages
    state           what is kept of a sequence, all zero before its first token
    num_parameters  numbers of its weights in the checkpoint
    output_scale    what its results are multiplied by behind the last product
    """

    name: str
    state: tuple[StateTensor, ...]
    num_parameters: int = 0
    output_scale: float = 1.0

    @property
    def products(self) -> RecurrenceProducts:
        """Return the sizes of its products; those of a kind that names none stay in the dtype of the model."""
        return RecurrenceProducts()

    def state_bytes(self, dtype: Dtype) -> int:
        """Return the bytes of a sequence's state in one layer where the weights are of `dtype`."""
        return sum(tensor.num_bytes(dtype) for tensor in self.state)

    def of_rank(self, rank: int, world: int) -> "RecurrenceConfig":
        """Return the part that one of several ranks computes: all of it, unless a kind can be split."""
        del rank, world
        return self

    def taking_back(self, num_drafted: int) -> "RecurrenceConfig":
        """Return the mixer with a state from which so many tokens of a step can be taken back, where a kind has one."""
        del num_drafted
        return self


Mixer = AttentionConfig | RecurrenceConfig


@dataclass(frozen=True, slots=True)
class NormsConfig:
    """The norms of attention and feed-forward alike: of what each reads, and of what each adds.

    is_parallel  whether both read the residual before the layer, which adds what both make of it
    is_shared    whether both read it, too, by the one norm that the layer has
    """

    before: bool = True
    after: bool = False
    is_parallel: bool = False
    is_shared: bool = False


class EagerActivation(Enum):
    """down(activation(up)), of a dense feed-forward alone: PyTorch computes it.

    Sources: Hendrycks and Gimpel 2016 (GELU); Huang and Schlag 2025 (xIELU, by numbers of each layer's own).
    """

    GELU = "ungated gelu"
    GELU_TANH = "ungated gelu by tanh"  # which approximates it
    RELU = "ungated relu"
    XIELU = "ungated xielu"


DenseActivation = Activation | CappedSilu | Ungated | EagerActivation


def num_inner_of(activation: AnyExpertActivation | EagerActivation) -> int:
    """Return the numbers of each column of a feed-forward with this activation: gate and up, or up alone."""
    return 1 if isinstance(activation, Ungated | EagerActivation) else 2


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """down(activation(gate) * up), or down(activation(up)) where the activation has no gate.

    gate_scale    what a gate is multiplied by before its activation
    output_scale  what its result is multiplied by in the end
    """

    width: int
    activation: DenseActivation
    has_bias: bool = False
    gate_scale: float = 1.0
    output_scale: float = 1.0

    @property
    def num_inner(self) -> int:
        """Return the numbers of each column: gate and up, or up alone."""
        return num_inner_of(self.activation)


_ROUTER_ROWS = 16  # whose numbers of fp32 are whole 64 bytes


@dataclass(frozen=True, slots=True)
class SharedExpertConfig:
    """A dense feed-forward that every token visits beside its experts.

    is_gated    whether its result is multiplied by the sigmoid of a product of one column
    activation  None: the experts'
    scale       what its result is multiplied by in the end
    is_stored_alike  whether its weights are in the format of the experts'
    """

    width: int
    is_gated: bool = False
    activation: DenseActivation | None = None
    scale: float = 1.0
    is_stored_alike: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts, each like a dense feed-forward of `width`, of which a token visits a few.

    Where the activation has no gate, experts and what all tokens visit have none.

    has_bias             whether each expert adds biases to gate, up and down
    has_router_bias      whether the router's product has one
    has_correction_bias  whether scores get one for choosing experts, and not for weighing them
    weighs_inputs        whether a token's weight multiplies what its one expert reads, not what that expert adds
    has_expert_scales    whether the weight of an expert is multiplied by a number of its own in the end
    norms_apart          whether router, experts and what all tokens visit each norm the residual by themselves, and
                         what experts and the others add is normed by itself before their sum is
    jitter               of a sparse mixer, by which a token's two experts are weighed one after the other: each by the
                         softmax of its logit and of those that are within so large a share of it; None: `routing` says
                         how they are weighed. Source: Liu et al. 2024 (GRIN), section 2.2
    latent               numbers that experts read and add, which a product makes of the hidden ones, and another one
                         makes hidden ones of; None: they read and add the hidden ones
    """

    width: int
    routing: RoutingConfig
    activation: AnyExpertActivation = Activation.SILU
    has_bias: bool = False
    has_router_bias: bool = False
    has_correction_bias: bool = False
    weighs_inputs: bool = False
    shared: SharedExpertConfig | None = None
    format: AnyExpertFormat = ExpertFormat.PLAIN
    has_expert_scales: bool = False
    norms_apart: bool = False
    jitter: float | None = None
    latent: int | None = None

    @property
    def num_inner(self) -> int:
        """Return the numbers of each column of an expert: gate and up, or up alone."""
        return num_inner_of(self.activation)

    def read_size(self, hidden: int) -> int:
        """Return how many numbers of a token an expert reads; `hidden`: of the model."""
        return hidden if self.latent is None else self.latent

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts

    @property
    def num_active(self) -> int:
        return self.routing.num_active

    @property
    def shared_is_expert(self) -> bool:
        """Return whether what all tokens visit is computed as one more expert: it differs in nothing but its weight.

        That is the sigmoid of its own logit, so that its gate is one more row of the router.
        """
        shared = self.shared
        if shared is None or not shared.is_gated or not shared.is_stored_alike or self.format is ExpertFormat.MXFP4:
            return False
        theirs = self.width, self.activation, 1.0
        is_alike = (shared.width, shared.activation or self.activation, shared.scale) == theirs
        others = self.has_bias, self.has_router_bias, self.has_expert_scales, self.weighs_inputs, self.norms_apart
        return is_alike and self.latent is None and not any(others)

    @property
    def num_experts_computed(self) -> int:
        """Return the experts of the products: the last one is what all tokens visit where that is an expert."""
        return self.num_experts + self.shared_is_expert

    @property
    def num_active_computed(self) -> int:
        """Return the experts of the products that a token visits."""
        return self.num_active + self.shared_is_expert

    @property
    def router_rows(self) -> int:
        """Return the rows of the router's weight, one of each expert of the products.

        Behind the one of what all tokens visit rows of zeros follow: of a number that is no multiple of 8 PyTorch alone
        computes more than 32 tokens on Hopper.
        """
        if not self.shared_is_expert:
            return self.num_experts
        return -(-self.num_experts_computed // _ROUTER_ROWS) * _ROUTER_ROWS

    @property
    def shared_activation(self) -> DenseActivation:
        """Return the activation of what all tokens visit, of a mixture that has such a feed-forward."""
        found = self.activation if self.shared is None or self.shared.activation is None else self.shared.activation
        assert isinstance(found, DenseActivation), "a feed-forward for all tokens has no activation of experts alone"
        return found


FeedForward = DenseConfig | ExpertsConfig


@dataclass(frozen=True, slots=True)
class LinearFormats:
    """Storage formats of a layer's products; a router's is always plain.

    qkv, output    of the mixer: attention's, or the first and the last product of a recurrence or a convolution
    gate_up, down  of a dense feed-forward, or of the experts that all tokens visit
    query_up, kv_up  of latent attention: what makes queries of their latent, and keys and values of theirs
    gates          of the gated delta rule: of writing and of decay
    to_latent, from_latent  of a mixture: what makes what experts read, and hidden numbers of what they add
    index_up, index_key  of its indexer: what makes queries of their latent, and its key; its weights are plain
    """

    qkv: WeightFormat = PLAIN
    output: WeightFormat = PLAIN
    gate_up: WeightFormat = PLAIN
    down: WeightFormat = PLAIN
    query_up: WeightFormat = PLAIN
    kv_up: WeightFormat = PLAIN
    gates: WeightFormat = PLAIN
    to_latent: WeightFormat = PLAIN
    from_latent: WeightFormat = PLAIN
    index_up: WeightFormat = PLAIN
    index_key: WeightFormat = PLAIN


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """mixer    what mixes the tokens of a sequence: attention over pages, or a recurrence over a state
    formats  of its products
    beside   a recurrence that reads what attention does, and adds to the same residual; of most layers None

    A layer without a mixer, or without a feed-forward, has no norms of it and adds nothing there.
    """

    mixer: Mixer | None
    norms: NormsConfig
    feed_forward: FeedForward | None
    formats: LinearFormats = LinearFormats()
    beside: RecurrenceConfig | None = None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Return all that mixes tokens in the layer."""
        return tuple(it for it in (self.mixer, self.beside) if it is not None)

    @property
    def recurrences(self) -> tuple[RecurrenceConfig, ...]:
        """Return those of them that keep a state; no layer has two."""
        return tuple(it for it in self.mixers if isinstance(it, RecurrenceConfig))

    @property
    def of_beside(self) -> "LayerConfig | None":
        """Return a layer of the recurrence beside attention alone, without the norm before both; None without one."""
        if self.beside is None:
            return None
        return LayerConfig(self.beside, NormsConfig(before=False), None, self.formats)

    @property
    def num_sublayers(self) -> int:
        """Return how often the layer adds to the residual."""
        return (self.mixer is not None) + (self.feed_forward is not None)

    @property
    def num_norms(self) -> int:
        """Return the norms of the hidden size."""
        return (1 if self.norms.is_shared else self.num_sublayers) * (self.norms.before + self.norms.after)

    @property
    def attends(self) -> bool:
        return isinstance(self.mixer, AttentionConfig)

    @property
    def attention(self) -> AttentionConfig:
        """Return the mixer of a layer that attends; no other one may be asked."""
        assert isinstance(self.mixer, AttentionConfig), "only a layer that attends has attention"
        return self.mixer


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """A second embedding of each token, with numbers for each layer, which adds them to the residual through a gate.

    width          numbers of a token for one layer
    vocab_size     tokens that have an embedding of this kind
    activation     of the gate
    absent_token   whose embedding stands for tokens that are given as embeddings and have no id
    """

    width: int
    vocab_size: int
    activation: Activation
    absent_token: int = 0


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """An embedding of each position, which is added to that of the token before the first layer.

    num_rows  of its table in the checkpoint
    first     the row of the first position
    """

    num_rows: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a decoder, in the same fields for all families; a family's file fills it from config.json."""

    family: str  # config.json's model_type
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position: int  # served unless a setting asks for more
    norm_eps: float
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    zero_centred_norms: bool = False  # norms multiply by 1 + weight
    zero_centred_final_norm: bool | None = None  # None: as the others
    eps_after: float | None = None  # of the norms behind sublayers; None: norm_eps
    norms_embedding: bool = False  # each token's embedding is normed, without a weight
    norms_subtract_mean: bool = False  # they are LayerNorms; else RMSNorms
    norms_have_weights: bool = True  # in the checkpoint; else all of them are 1
    norms_have_biases: bool = False  # those LayerNorms; no RMSNorm has one, and no norm of queries and keys
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # to the dtype of the weights
    residual_scale: float = 1.0  # of what attention and feed-forward add
    head_has_bias: bool = False  # added to the logits
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    positions: LearnedPositions | None = None
    per_layer: PerLayerConfig | None = None
    has_layer_scales: bool = False  # the residual behind each layer is multiplied by a number of the checkpoint
    rounds_at_load: bool = False  # the checkpoint has plain products, which become those of `formats` when it is loaded
    head_format: WeightFormat = PLAIN  # of the head where it is not tied
    packing: Packing | None = None  # of weights of 4 bits in the checkpoint
    caches_fp8: bool = False  # the checkpoint asks for a KV cache of 8 bits
    input_bound: float | None = None  # of products that are not plain: inputs beyond it are cut off, then rounded
    tower: TowerConfig | None = None  # makes embeddings of images; None where a server takes none
    num_draft_layers: int = 0  # of `layers`, the last ones: those of the draft head, which computes no answer
    rounds_draft_logits: bool = False  # a draft head chooses by a copy of the head, rounded to 8 bits at load
    draft_layer: LayerConfig | None = None  # of its draft head, where a quantised checkpoint says how it stores that

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend, by their places among all layers; only these have keys, values and pages."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.attends)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention of each of `attention_layers`."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig))

    @property
    def recurrences(self) -> tuple[RecurrenceConfig, ...]:
        """The mixers that keep a state, in the order of their layers."""
        return tuple(recurrence for layer in self.layers for recurrence in layer.recurrences)

    def layer_that_chooses_for(self, index: int) -> int:
        """Return the latest layer up to this one that has an indexer, by its place among all; one must have."""
        indexers = [it.values.indexer if it.values is not None else None for it in self.attentions]
        own = zip(self.attention_layers, indexers, strict=True)
        return max(layer for layer, it in own if layer <= index and it is not None and it.heads)

    @property
    def longest_context(self) -> int:
        """Most positions that can be served: `max_position`, or beyond it what all rotations are stretched to."""
        ropes = (attention.rope for attention in self.attentions if attention.rope.kind is not RopeKind.NONE)
        longest = (rope.longest_context(self.max_position) for rope in ropes)
        return min(longest, default=self.max_position)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer that attends."""
        return tuple(attention.window for attention in self.attentions)

    @property
    def chunks(self) -> tuple[int | None, ...]:
        """The chunk of each layer that attends."""
        return tuple(attention.chunk for attention in self.attentions)

    @property
    def chunk(self) -> int | None:
        """The chunk of all layers that have one; None where none has. A family's layers have chunks of one size."""
        return next((chunk for chunk in self.chunks if chunk is not None), None)

    @property
    def has_image_spans(self) -> bool:
        """Return whether prompts may hold images whose tokens see each other both ways in some layer."""
        return any(attention.sees_spans for attention in self.attentions)

    @property
    def has_three_positions(self) -> bool:
        """Return whether a token's position has three parts, of which each pair of dimensions is rotated by one."""
        return any(attention.rope.position_parts for attention in self.attentions)

    @property
    def has_mixtures(self) -> bool:
        """Return whether any layer has experts."""
        return any(isinstance(layer.feed_forward, ExpertsConfig) for layer in self.layers)

    @property
    def embedding_size(self) -> int:
        """Numbers of the embedding, and of the head."""
        return self.vocab_size * self.hidden_size


def cached_dtype(attention: AttentionConfig, dtype: Dtype, kv_dtype: Dtype) -> Dtype:
    """The dtype of a layer's pages. dtype: of the model; kv_dtype: of the cache as a whole."""
    return dtype if kv_dtype is FP8 and attention.skips_fp8_cache else kv_dtype


def kv_bytes_per_token(config: ModelConfig, dtype: Dtype, kv_dtype: Dtype) -> int:
    """Bytes of cache that one token takes in all layers that have keys and values of their own."""
    layers = (it for it in config.attentions if it.has_own_keys)
    return sum(cached_bytes_of(it, cached_dtype(it, dtype, kv_dtype)) for it in layers)


def cached_bytes_of(attention: AttentionConfig, dtype: Dtype) -> int:
    """Bytes of cache that one token takes in a layer with keys and values of its own; `dtype` of its pages."""
    dims = (attention.cached_dim,) if attention.is_latent else (attention.head_dim, attention.output_dim)
    return attention.num_kv_heads * sum(cached_bytes(dtype, dim) for dim in dims)


def state_bytes(config: ModelConfig, dtype: Dtype) -> int:
    """Bytes of the states that all recurrences keep of one sequence, however long it is; `dtype` of the weights."""
    return sum(recurrence.state_bytes(dtype) for recurrence in config.recurrences)


def num_parameters(config: ModelConfig, num_tokens: int | None = None) -> int:
    """Numbers in the checkpoint; tied embeddings count once.

    num_tokens   only those that so many tokens can be multiplied by: of a mixture no more experts than they visit
    """
    embeddings = config.embedding_size * (1 if config.tie_embeddings else 2) + config.vocab_size * config.head_has_bias
    if config.positions is not None:
        embeddings += config.positions.num_rows * config.hidden_size
    layers = sum(_all_visit(config, it) + _expert_parameters(config, it, num_tokens) for it in config.layers)
    of_draft_head = config.num_draft_layers * config.hidden_size * (2 * config.hidden_size + 3)
    return embeddings + layers + _norm_parameters(config) + _per_layer_parameters(config) + of_draft_head


def weight_bytes(config: ModelConfig, dtype: Dtype, num_tokens: int | None = None) -> int:
    """Bytes of these numbers in memory, each in its format. One of mxfp4 takes 4 bits, and 32 of them a byte more."""
    packed = sum(
        _num_visited(layer.feed_forward, num_tokens) * 3 * config.hidden_size * layer.feed_forward.width
        for layer in config.layers
        if isinstance(layer.feed_forward, ExpertsConfig) and layer.feed_forward.format is ExpertFormat.MXFP4
    )
    plain = num_parameters(config, num_tokens) - packed
    saved = sum(_bytes_saved(config.hidden_size, layer, dtype, num_tokens) for layer in config.layers)
    if not config.tie_embeddings:
        of_head = config.embedding_size
        saved += of_head * dtype.num_bytes - bytes_of(config.head_format, of_head, dtype)
    copied = bytes_of(FP8_ROWS, config.embedding_size, dtype) if config.rounds_draft_logits else 0
    return plain * dtype.num_bytes - saved + copied + packed // 2 + packed // MXFP4_BLOCK


def _bytes_saved(hidden: int, layer: LayerConfig, dtype: Dtype, num_tokens: int | None) -> int:
    """Bytes that a layer's products take less than in `dtype`. Their scales, 4 bytes a group, are not counted."""
    formats, fed, mixer = layer.formats, layer.feed_forward, layer.mixer
    counts: list[tuple[WeightFormat, int]] = []
    if isinstance(mixer, AttentionConfig):
        counts += [(formats.qkv, hidden * mixer.projected_size)]
        counts += [(formats.output, hidden * mixer.output_size)]
        counts += [(formats.query_up, mixer.query_up_numbers), (formats.kv_up, mixer.kv_up_numbers)]
        of_queries, of_key = mixer.indexer_numbers(hidden)
        counts += [(formats.index_up, of_queries), (formats.index_key, of_key)]
    for of in (it.products for it in layer.recurrences):
        counts += [(formats.qkv, of.first), (formats.output, of.output), (formats.gates, of.gates)]
    dense = fed.shared if isinstance(fed, ExpertsConfig) else fed
    if fed is not None and dense is not None:
        num_inner = num_inner_of(fed.shared_activation) if isinstance(fed, ExpertsConfig) else fed.num_inner
        counts += [(formats.gate_up, num_inner * hidden * dense.width), (formats.down, hidden * dense.width)]
    if isinstance(fed, ExpertsConfig) and fed.latent is not None:
        counts += [(it, hidden * fed.latent) for it in (formats.to_latent, formats.from_latent)]
    if isinstance(fed, ExpertsConfig) and isinstance(fed.format, FewBitFormat):
        counts += [
            (
                fed.format.of_weights,
                _num_visited(fed, num_tokens) * (fed.num_inner + 1) * fed.read_size(hidden) * fed.width,
            )
        ]
    return sum(count * dtype.num_bytes - bytes_of(it, count, dtype) for it, count in counts)


def _all_visit(config: ModelConfig, layer: LayerConfig) -> int:
    """Numbers of a layer that all tokens are multiplied by: all but those of its experts."""
    hidden = config.hidden_size
    count = layer.num_norms * _norm_parameters(config) + config.has_layer_scales
    for mixer in layer.mixers:
        count += mixer.num_parameters(hidden) if isinstance(mixer, AttentionConfig) else mixer.num_parameters
    match layer.feed_forward:
        case None:
            return count
        case DenseConfig(width, activation, has_bias) as dense:
            count += 2 * (activation is EagerActivation.XIELU)
            return count + (dense.num_inner + 1) * hidden * width + (dense.num_inner * width + hidden) * has_bias
        case ExpertsConfig() as mixture:
            of_expert = hidden + mixture.has_router_bias + mixture.has_correction_bias + mixture.has_expert_scales
            count += mixture.num_experts * of_expert + 4 * hidden * mixture.norms_apart
            if mixture.latent is not None:
                count += 2 * hidden * mixture.latent
            if mixture.shared is not None:
                num_products = num_inner_of(mixture.shared_activation) + 1
                count += num_products * hidden * mixture.shared.width + hidden * mixture.shared.is_gated
            return count


def _norm_parameters(config: ModelConfig) -> int:
    """Numbers of a norm of the hidden size."""
    return config.hidden_size * (config.norms_have_weights + config.norms_have_biases)


def _per_layer_parameters(config: ModelConfig) -> int:
    """Numbers of the embeddings for each layer: their table, a product and a norm, and of each layer two and a norm."""
    if config.per_layer is None:
        return 0
    width, hidden, num_layers = config.per_layer.width, config.hidden_size, config.num_layers
    of_layer = width * (config.per_layer.vocab_size + 3 * hidden) + hidden
    return num_layers * of_layer + width


def _expert_parameters(config: ModelConfig, layer: LayerConfig, num_tokens: int | None) -> int:
    """Numbers of a layer's experts, or of those that `num_tokens` can visit; 0 for a dense layer."""
    mixture = layer.feed_forward
    if not isinstance(mixture, ExpertsConfig):
        return 0
    hidden = mixture.read_size(config.hidden_size)
    size = (mixture.num_inner + 1) * hidden * mixture.width + (2 * mixture.width + hidden) * mixture.has_bias
    return _num_visited(mixture, num_tokens) * size


def _num_visited(mixture: ExpertsConfig, num_tokens: int | None) -> int:
    return mixture.num_experts if num_tokens is None else min(mixture.num_experts, num_tokens * mixture.num_active)
