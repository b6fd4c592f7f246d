"""Model families: how config.json is read, and what checkpoints call each weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from qualification.model.config import ModelConfig
from qualification.model.fields import Fields
from qualification.model.keys import Keys


class ExpertLayout(Enum):
    """Layout of a layer's experts in a checkpoint."""

    EACH = "each"  # each matrix of each expert is a tensor
    # All experts are one tensor, gate and up another, whose rows alternate; transposed unless they are mxfp4.
    INTERLEAVED = "interleaved"
    STACKED = "stacked"  # gate, up and down are each one tensor of all experts, of `experts`
    HALVES = "halves"  # all experts are one tensor, gate and then up another; both transposed where they are published


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a mixture's tensors within its layer.

    gate, up, down   the matrices of an expert: of `experts`.<its number> where each is a tensor
    correction       the bias for choosing experts; None: `e_score_correction_bias` of the router
    correction_is_matrix  whether that bias is a matrix of one row
    router_is_plain  whether the router is in 16 bits or more, though published files do not list it as such
    has_image_experts  whether as many experts that only images visit follow those of text, and have the second row of
                     that bias and a router of their own, `weight_1`; both routers have a row for each number read
    joined_gate_up, joined_down  the tensors of all experts, of `experts`, where they are joined
    shared           the feed-forward that all tokens visit; its gate is a product beside it
    shared_gate_up   its gate and up as one product; None: they are two, `gate_proj` and `up_proj`
    shared_down      its last product
    to_latent, from_latent  the products that make what experts read, and hidden numbers of what they add
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    joined_gate_up: str = "gate_up_proj"
    joined_down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate_up: str | None = None
    shared_down: str = "down_proj"
    to_latent: str = "mixer.fc1_latent_proj"
    from_latent: str = "mixer.fc2_latent_proj"
    layout: ExpertLayout = ExpertLayout.EACH
    correction: str | None = None
    correction_is_matrix: bool = False
    router_is_plain: bool = False
    has_image_experts: bool = False

    @property
    def shared_gate(self) -> str:
        return f"{self.shared}_gate"

    @property
    def correction_bias(self) -> str:
        return self.correction or f"{self.router}.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class RecurrenceNames:
    """The names of a recurrent layer's tensors within it; of lightning attention nothing but `prefix` is asked.

    is_fused  whether queries, keys, values and the gates of the result are one tensor, those of a key head together,
              and the gates of decay and of writing another
    is_apart  whether queries, keys and values, and what makes their gates, are a tensor each, as Kimi Linear has them:
              then products have no prefix but the layer's own, and the rule's numbers no module of their own
    """

    prefix: str = "linear_attn"
    is_fused: bool = False
    is_apart: bool = False


GATE_UP = "gate_up_proj", "down_proj"


def within(module: str, name: str) -> str:
    """Return the name of what a module of a layer has; of what the layer itself has where the module is ""."""
    return f"{module}.{name}" if module else name


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a layer's tensors within it, as in most families. Norms that a layer lacks are not looked for.

    qkv                   the tensor of queries, keys and values, of `attention`; None: these are one each
    qkv_is_by_head        whether that has, of each KV head, its queries, its key and its value; else all queries come
                          before all keys and all values
    dense_joined          of a dense feed-forward whose gate and up are one product: that, and the last one
    neighbours_are_pairs  whether the dimensions of a head that are rotated together are neighbours; in other files, and
                          in memory, the first ones of all pairs come before the second ones
    before_feed_forward   the norm of what the feed-forward reads
    q_norm, k_norm        those of queries and keys
    attention_gate        the product that gates the heads, where it is none of the queries'
    feed_forward          a dense one; "": its products are the layer's own
    experts               None for a family without mixtures
    recurrence            of layers of the gated delta rule; None for a family without
    convolution           the beginning of the names of a short convolution's tensors; None for a family without
    attention_output      the product behind attention
    dense                 gate, up and the last product of a dense feed-forward; up twice where it has no gate
    final_norm            the norm behind the last layer
    attention             what the names of attention's products begin with
    sinks                 a logit of each head that joins its softmax, where a layer has them
    products_are_turned   whether a layer's products have a row for each number that they read, in place of a column
    norms_are_stored      whether a checkpoint has the norms of the hidden size; else their weights are all 1
    """

    qkv: str | None = None
    qkv_is_by_head: bool = False
    dense_joined: tuple[str, str] | None = None
    neighbours_are_pairs: bool = False
    before_feed_forward: str = "post_attention_layernorm"
    before_attention: str = "input_layernorm"
    after_attention: str = "post_attention_layernorm"
    after_feed_forward: str = "post_feedforward_layernorm"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_gate: str = "self_attn.g_proj"
    feed_forward: str = "mlp"
    experts: ExpertNames | None = None
    recurrence: RecurrenceNames | None = None
    convolution: str | None = None
    attention_output: str = "self_attn.o_proj"
    dense: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    final_norm: str = "norm"
    attention: str = "self_attn"
    sinks: str = "self_attn.sinks"
    products_are_turned: bool = False
    norms_are_stored: bool = True


@dataclass(frozen=True, slots=True)
class Family:
    """model_type, architectures   as in config.json
    read_config   fields of config.json -> ModelConfig; raises ModelConfigError
    keys          of config.json that are known; of a model that also sees images, those of the text part
    tensors       None where the server does not serve the family, and only its attention is of interest
    tolerated     ends of names that a checkpoint may hold without need
    renamed       beginnings of names in a checkpoint -> those of other families; the first that fits
    not_read      beginnings of names of tensors that predict several tokens at once, which are not read
    has_more_layers    whether a checkpoint may hold layers behind the model's last one, which are not read
    has_quantization   whether `read_config` reads quantization_config, which quantization.py reads for other families
    """

    model_type: str
    architectures: tuple[str, ...]
    read_config: Callable[[Fields], ModelConfig]
    keys: Keys
    tensors: TensorNames | None = TensorNames()
    tolerated: tuple[str, ...] = ("rotary_emb.inv_freq",)  # a constant that old exporters wrote down
    not_read: tuple[str, ...] = ()
    has_more_layers: bool = False
    has_quantization: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)

    def read(self, values: Mapping[str, object], source: str) -> ModelConfig:
        """Read a parsed config.json. Raises ModelConfigError for a key that is refused, missing or wrong."""
        self.keys.check(values, source)
        return self.read_config(Fields(values, source))
