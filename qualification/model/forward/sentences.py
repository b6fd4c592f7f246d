"""The definitions of the model families as published: written here once more, by hand.

Sizes and numbers come from ModelConfig. What makes a family itself (where it norms, what its tensors are called, how it
routes) stands here too, so that a family's reader and the decoder cannot both be wrong in the same line.
"""

from dataclasses import dataclass, replace
from enum import Enum


class NormOrder(Enum):
    """Where a layer norms."""

    BEFORE = "before"  # x + f(norm(x)): input_layernorm, then post_attention_layernorm before the feed-forward
    SANDWICH = "sandwich"  # x + norm(f(norm(x)))
    AFTER = "after"  # x + norm(f(x))
    PARALLEL = "parallel"  # x + attention(norm(x)) + feed_forward(norm(x)), of one norm: input_layernorm
    PARALLEL_APART = "parallel, apart"  # the same of two norms, both of x: those of BEFORE
    AS_CONFIGURED = "as config.json says"  # BEFORE, or one of both ways in parallel


class Scoring(Enum):
    """The way in which a router's logits become the weights of a token's experts."""

    SOFTMAX = "softmax over all experts"
    SOFTMAX_OF_CHOSEN = "softmax over the chosen experts"
    SIGMOID = "sigmoid of each expert"
    # Of each of two experts one after the other: the softmax of its logit and of those left that are within 2 jitter of
    # it, as shares of the larger size of both.
    SPARSE_MIXER = "sparse mixer"


class HeadGate(Enum):
    """The function of the gate's product by which heads are multiplied, in fp32."""

    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"


@dataclass(frozen=True, slots=True)
class MixtureSentence:
    """Names within a layer, and the router's scores.

    scores          None: what config.json says, of softmax over all, or over the chosen ones where it has
                    norm_topk_prob, and sigmoid
    correction      the bias for choosing experts; None: e_score_correction_bias of the router, where there is one
    weighs_inputs   whether the weight of a token's one expert multiplies what that reads; else what it adds
    norms_apart     whether router, experts and `shared` each norm the residual: the router without a weight but by a
                    scale / sqrt(hidden); what experts and `shared` add is normed each, and their sum again
    expert_scales   what the weight of each expert is multiplied by; None: by nothing
    is_interleaved  whether all experts are one tensor in which gate and up alternate
    is_stacked      whether each of `gate`, `up` and `down` is one tensor of all experts, of `experts`
    joined          the names of tensors of all experts, where a checkpoint has these: of gate, which up follows, and of
                    the last products, transposed or not
    has_image_experts  whether the first half of the experts, and the first row of the bias, are those of text, and the
                    router has a row for each number that it reads
    latent          the names of the products that make what experts read of what the router reads, and of what they add
                    what the mixture adds, where a checkpoint has these
    shared_joined   the names of the products of `shared`, of which the first has gate and up; None: these are apart
    """

    router: str
    experts: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str | None = None
    shared_gate: str | None = None
    scores: Scoring | None = None
    correction: str | None = None
    weighs_inputs: bool = False
    is_interleaved: bool = False
    is_stacked: bool = False
    joined: tuple[str, str] = ("gate_up_proj", "down_proj")
    shared_joined: tuple[str, str] | None = None
    norms_apart: bool = False
    expert_scales: str | None = None
    latent: tuple[str, str] | None = None
    has_image_experts: bool = False


@dataclass(frozen=True, slots=True)
class RecurrenceSentence:
    """Names within a layer that does not attend.

    is_fused  whether queries, keys, values and the gates of the result are one tensor, those of a key head together,
              and the gates of writing and decay another
    is_space  whether it is a state space, of which one tensor makes gates, x, B, C and steps, in this order
    is_kimi   whether it is Kimi Delta Attention: a decay for each channel of a key; queries, keys and values are
              products of their own with convolutions of their own; decays and the gates of the result are two products
              each, without a function between them; the result is normed and multiplied by sigmoids
    is_lightning  whether it is lightning attention: queries, keys and values are one tensor, and each head of the first
              two is normed, where there are such norms, and rotated, with pairs of dimensions i and i + r / 2; groups
              of the heads' results are normed together and multiplied by sigmoids
    """

    prefix: str = "linear_attn"
    is_fused: bool = False
    is_space: bool = False
    is_kimi: bool = False
    is_lightning: bool = False


@dataclass(frozen=True, slots=True)
class Sentence:
    """One family's forward pass.

    norm_offset       norms multiply by offset + weight
    norms_subtract_mean  norms are LayerNorms; else RMSNorms; None: as config.json says
    norms_add_biases  those LayerNorms add a bias behind their weight
    norms_have_weights  of the hidden size; else all their weights are 1
    final_norm_offset  that of the norm behind the last layer; None: norm_offset
    embedding_is_normed  without a weight
    embedding_is_scaled_by_width  by sqrt(hidden size), rounded to the dtype
    layers            what names of layers begin with
    products_are_turned  whether a layer's products are stored [in, out]
    qkv               the tensor of q, k and v; None: these are one each
    qkv_is_by_head    whether that has, of each KV head, its queries, its key and its value; else all queries come first
    dense_joined      the product of gate and up, and the last one, where the first two are one tensor
    after_attention, before_feed_forward, after_feed_forward   names of the norms of SANDWICH and AFTER
    q_norm, k_norm    names of the norms of queries and keys, where there are some
    gate              the product that gates the heads, where it is none of the queries'
    norms_rotated     whether these norm heads that are rotated already
    norms_rotating_layers  whether norms without a weight, where config.json asks for them, are of heads rotated already
    feed_forward      a dense one, "" where its products are the layer's own; feeds_ungated: down(relu(up)^2), or
                      down(gelu(up)), down(relu(up)) or down(xielu(up)) where config.json says so
    attention         what the names of attention's products begin with
    embedding         the name of the embedding
    positions         that of what is added to it of each position; None: nothing is; first_position: its first row
    gates_in_queries  whether the gates' rows are those behind each head's query, in the tensor of queries
    recurrence        of layers that do not attend
    convolution       the beginning of the names of a short convolution's tensors
    before_attention, between   the norms of what a mixer reads and, of BEFORE, of what the feed-forward reads
    attention_output  the product behind attention
    dense             gate, up and the last product of a dense feed-forward
    final_norm        the norm behind the last layer
    norms_values      each head of the values is normed, without a weight; values that no tensor makes are the keys as
                      a product has made them
    scale             what the residual behind a layer is multiplied by; None: by nothing
    rotates_neighbours  whether pairs of dimensions that are rotated are neighbours; else dimension i and i + r / 2
    sinks             logits of the heads, which join the softmax of layers that have them; None: of a family without
    scales_values     by a number of config.json, where values may have a size of their own, too
    queries_grow      by 1 + rate * ln(1 + floor(position / span)), behind the rotation, where config.json has a rate
    index_neighbours  whether the pairs that an indexer rotates are neighbours; None: of a family without indexers
    """

    order: NormOrder = NormOrder.BEFORE
    norm_offset: float = 0.0
    norms_subtract_mean: bool | None = False
    norms_add_biases: bool = False
    norms_have_weights: bool = True
    final_norm_offset: float | None = None
    embedding_is_normed: bool = False
    embedding_is_scaled_by_width: bool = False
    qkv: str | None = None
    qkv_is_by_head: bool = False
    dense_joined: tuple[str, str] | None = None
    after_attention: str = "post_attention_layernorm"
    before_feed_forward: str = "pre_feedforward_layernorm"
    after_feed_forward: str = "post_feedforward_layernorm"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "self_attn.g_proj"
    norms_rotated: bool = False
    norms_rotating_layers: bool = False
    feed_forward: str = "mlp"
    feeds_ungated: bool = False
    attention: str = "self_attn"
    embedding: str = "embed_tokens"
    positions: str | None = None
    first_position: int = 0
    layers: str = "layers"
    products_are_turned: bool = False
    rotates_neighbours: bool = False
    sinks: str | None = None
    scales_values: bool = False
    queries_grow: bool = False
    index_neighbours: bool | None = None
    head_gate: HeadGate | None = None
    mixture: MixtureSentence | None = None
    gates_in_queries: bool = False
    recurrence: RecurrenceSentence | None = None
    convolution: str | None = None
    before_attention: str = "input_layernorm"
    between: str = "post_attention_layernorm"
    attention_output: str = "self_attn.o_proj"
    dense: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    final_norm: str = "norm"
    norms_values: bool = False
    scale: str | None = None

    def subtracts_mean(self, *, config_says: bool) -> bool:
        """Return whether norms are LayerNorms, of a model whose config.json says so or not."""
        return config_says if self.norms_subtract_mean is None else self.norms_subtract_mean


_BAMBA = Sentence(
    between="pre_ff_layernorm",
    feed_forward="feed_forward",
    final_norm="final_layernorm",
    recurrence=RecurrenceSentence("mamba", is_space=True),
)
_QWEN_MIXTURE = MixtureSentence(
    "mlp.gate", "mlp.experts", shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"
)
_BAILING = Sentence(
    embedding="word_embeddings",
    attention="attention",
    attention_output="attention.dense",
    qkv="attention.query_key_value",
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
    mixture=MixtureSentence(
        "mlp.gate",
        "mlp.experts",
        shared="mlp.shared_experts",
        scores=Scoring.SIGMOID,
        correction="mlp.gate.expert_bias",
    ),
)
_ERNIE_MIXTURE = MixtureSentence(
    "mlp.gate",
    "mlp.experts",
    shared="mlp.shared_experts",
    scores=Scoring.SOFTMAX_OF_CHOSEN,
    correction="mlp.moe_statics.e_score_correction_bias",
)
_ERNIE = Sentence(rotates_neighbours=True, mixture=_ERNIE_MIXTURE)
_GLM_4 = Sentence(
    NormOrder.SANDWICH,
    dense_joined=("gate_up_proj", "down_proj"),
    after_attention="post_self_attn_layernorm",
    before_feed_forward="post_attention_layernorm",
    after_feed_forward="post_mlp_layernorm",
    rotates_neighbours=True,
)
_GPT_2 = Sentence(
    norms_subtract_mean=True,
    norms_add_biases=True,
    feeds_ungated=True,
    embedding="wte",
    positions="wpe",
    layers="h",
    products_are_turned=True,
    before_attention="ln_1",
    between="ln_2",
    qkv="attn.c_attn",
    attention_output="attn.c_proj",
    dense=("c_fc", "c_fc", "c_proj"),
    final_norm="ln_f",
)
_GRANITE = Sentence(
    mixture=MixtureSentence(
        "block_sparse_moe.router.layer",
        "block_sparse_moe",
        shared="shared_mlp",
        scores=Scoring.SOFTMAX_OF_CHOSEN,
        joined=("input_linear.weight", "output_linear.weight"),
        shared_joined=("input_linear", "output_linear"),
    )
)
_DEEPSEEK = Sentence(
    rotates_neighbours=True,
    mixture=MixtureSentence("mlp.gate", "mlp.experts", shared="mlp.shared_experts", scores=Scoring.SIGMOID),
)
_MIMO = Sentence(
    sinks="self_attn.attention_sink_bias",
    scales_values=True,
    mixture=MixtureSentence("mlp.gate", "mlp.experts", scores=Scoring.SIGMOID),
)
_HUNYUAN = Sentence(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm", norms_rotated=True)

_LFM2 = Sentence(
    before_attention="operator_norm",
    between="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    attention_output="self_attn.out_proj",
    convolution="conv",
    feed_forward="feed_forward",
    dense=("w1", "w3", "w2"),
    final_norm="embedding_norm",
)
_GEMMA_4 = Sentence(
    NormOrder.SANDWICH,
    embedding_is_scaled_by_width=True,
    norms_values=True,
    scale="layer_scalar",
    mixture=MixtureSentence(
        "router.proj",
        "experts",
        shared="mlp",
        scores=Scoring.SOFTMAX_OF_CHOSEN,
        norms_apart=True,
        expert_scales="router.per_expert_scale",
    ),
)

SENTENCES: dict[str, Sentence] = {
    "afmoe": Sentence(
        NormOrder.SANDWICH,
        before_feed_forward="pre_mlp_layernorm",
        after_feed_forward="post_mlp_layernorm",
        head_gate=HeadGate.SIGMOID,
        gate="self_attn.gate_proj",
        mixture=MixtureSentence(
            "mlp.router.gate",
            "mlp.experts",
            shared="mlp.shared_experts",
            scores=Scoring.SIGMOID,
            correction="mlp.expert_bias",
        ),
    ),
    "apertus": Sentence(feeds_ungated=True, before_attention="attention_layernorm", between="feedforward_layernorm"),
    "arcee": Sentence(feeds_ungated=True),
    "bailing_hybrid": replace(
        _BAILING, qkv=None, rotates_neighbours=True, recurrence=RecurrenceSentence("attention", is_lightning=True)
    ),
    "bailing_moe": _BAILING,
    "bailing_moe_v2": _BAILING,
    "bamba": _BAMBA,
    "cohere": Sentence(NormOrder.PARALLEL, norms_subtract_mean=True, rotates_neighbours=True),
    "cohere2": Sentence(NormOrder.PARALLEL, norms_subtract_mean=True, rotates_neighbours=True),
    "cohere2_moe": Sentence(
        NormOrder.PARALLEL,
        norms_subtract_mean=None,
        rotates_neighbours=True,
        mixture=MixtureSentence("mlp.gate", "mlp.experts", shared="mlp.shared_experts"),
    ),
    "cwm": Sentence(),
    "deepseek_ocr2_text": Sentence(
        mixture=MixtureSentence("mlp.gate", "mlp.experts", shared="mlp.shared_experts", scores=Scoring.SOFTMAX)
    ),
    "deepseek_v2": replace(
        _DEEPSEEK,
        mixture=MixtureSentence("mlp.gate", "mlp.experts", shared="mlp.shared_experts", scores=Scoring.SOFTMAX),
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": replace(_DEEPSEEK, index_neighbours=False),
    "dots1": Sentence(
        mixture=MixtureSentence("mlp.gate", "mlp.experts", shared="mlp.shared_experts", scores=Scoring.SIGMOID),
    ),
    "ernie4_5": Sentence(rotates_neighbours=True),
    "ernie4_5_moe": _ERNIE,
    "ernie4_5_vl_moe_text": replace(_ERNIE, mixture=replace(_ERNIE_MIXTURE, has_image_experts=True)),
    "exaone4": Sentence(NormOrder.AFTER),
    "exaone_moe": Sentence(
        mixture=MixtureSentence(
            "mlp.gate",
            "mlp.experts",
            shared="mlp.shared_experts",
            scores=Scoring.SIGMOID,
            correction="mlp.e_score_correction_bias",
        ),
    ),
    "falcon_h1": _BAMBA,
    "flex_olmo": Sentence(NormOrder.AFTER, mixture=MixtureSentence("mlp.gate", "mlp.experts")),
    "gemma": Sentence(norm_offset=1.0, embedding_is_scaled_by_width=True),
    "gemma2": Sentence(NormOrder.SANDWICH, 1.0, embedding_is_scaled_by_width=True),
    "gemma3_text": Sentence(NormOrder.SANDWICH, 1.0, embedding_is_scaled_by_width=True),
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": _GEMMA_4,
    "glm": Sentence(dense_joined=("gate_up_proj", "down_proj"), rotates_neighbours=True),
    "glm4": _GLM_4,
    "glm4_moe": Sentence(
        mixture=MixtureSentence("mlp.gate", "mlp.experts", shared="mlp.shared_experts", scores=Scoring.SIGMOID),
    ),
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": replace(_DEEPSEEK, index_neighbours=True),
    "glm4v_text": _GLM_4,
    "glm4v_moe_text": Sentence(
        mixture=MixtureSentence("mlp.gate", "mlp.experts", shared="mlp.shared_experts", scores=Scoring.SIGMOID),
    ),
    "glm_ocr_text": _GLM_4,
    "gpt_neox": Sentence(
        NormOrder.AS_CONFIGURED,
        norms_subtract_mean=True,
        norms_add_biases=True,
        feeds_ungated=True,
        embedding="embed_in",
        qkv="attention.query_key_value",
        qkv_is_by_head=True,
        attention_output="attention.dense",
        dense=("dense_h_to_4h", "dense_h_to_4h", "dense_4h_to_h"),
        final_norm="final_layer_norm",
    ),
    "gpt_oss": Sentence(
        sinks="self_attn.sinks",
        mixture=MixtureSentence("mlp.router", "mlp.experts", scores=Scoring.SOFTMAX_OF_CHOSEN, is_interleaved=True),
    ),
    "gpt2": _GPT_2,
    "gpt_bigcode": replace(_GPT_2, products_are_turned=False, qkv_is_by_head=True),
    "granite": Sentence(),
    "granite_swa": Sentence(sinks="self_attn.sinks"),
    "granitemoe": _GRANITE,
    "granitemoehybrid": replace(
        _GRANITE,
        feed_forward="shared_mlp",
        dense_joined=("input_linear", "output_linear"),
        recurrence=RecurrenceSentence("mamba", is_space=True),
    ),
    "granitemoeshared": _GRANITE,
    "granitemoe_swa": Sentence(
        sinks="self_attn.sinks",
        mixture=MixtureSentence(
            "block_sparse_moe.router",
            "block_sparse_moe.experts",
            shared="shared_mlp",
            scores=Scoring.SOFTMAX_OF_CHOSEN,
            shared_joined=("input_linear", "output_linear"),
        ),
    ),
    "helium": Sentence(rotates_neighbours=True),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        mixture=MixtureSentence(
            "mlp.gate.wg", "mlp.experts", shared="mlp.shared_mlp", scores=Scoring.SOFTMAX_OF_CHOSEN
        ),
    ),
    "hunyuan_vl_text": _HUNYUAN,
    "hy_v3": Sentence(
        mixture=MixtureSentence(
            "mlp.router.gate",
            "mlp.experts",
            shared="mlp.shared_mlp",
            scores=Scoring.SIGMOID,
            correction="mlp.expert_bias",
        ),
    ),
    "internlm2": Sentence(
        qkv="attention.wqkv",
        qkv_is_by_head=True,
        attention_output="attention.wo",
        embedding="tok_embeddings",
        before_attention="attention_norm",
        between="ffn_norm",
        feed_forward="feed_forward",
        dense=("w1", "w3", "w2"),
    ),
    "internlm3": Sentence(),
    "jais2": Sentence(norms_subtract_mean=True, norms_add_biases=True, feeds_ungated=True),
    "kimi_k2": _DEEPSEEK,
    "kimi_linear": Sentence(
        recurrence=RecurrenceSentence("self_attn", is_kimi=True),
        mixture=MixtureSentence(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts",
            "w1",
            "w3",
            "w2",
            shared="block_sparse_moe.shared_experts",
            scores=Scoring.SIGMOID,
        ),
    ),
    "laguna": Sentence(
        head_gate=HeadGate.SOFTPLUS,
        mixture=MixtureSentence(
            "mlp.gate",
            "mlp.experts",
            shared="mlp.shared_expert",
            scores=Scoring.SIGMOID,
            correction="mlp.experts.e_score_correction_bias",
        ),
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        mixture=MixtureSentence(
            "feed_forward.gate",
            "feed_forward.experts",
            "w1",
            "w3",
            "w2",
            scores=Scoring.SIGMOID,
            correction="feed_forward.expert_bias",
        ),
    ),
    "llama": Sentence(),
    "llama4_text": Sentence(
        norms_rotating_layers=True,
        rotates_neighbours=True,
        queries_grow=True,
        feed_forward="feed_forward",
        mixture=MixtureSentence(
            "feed_forward.router",
            "feed_forward.experts",
            shared="feed_forward.shared_expert",
            scores=Scoring.SIGMOID,
            weighs_inputs=True,
        ),
    ),
    "mellum": Sentence(mixture=MixtureSentence("mlp.gate", "mlp.experts")),
    "mimo_v2": _MIMO,
    "mimo_v2_flash": _MIMO,
    "minicpm": Sentence(),
    "minicpm3": Sentence(),
    "minimax_m2": Sentence(
        mixture=MixtureSentence(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts",
            "w1",
            "w3",
            "w2",
            scores=Scoring.SIGMOID,
            correction="block_sparse_moe.e_score_correction_bias",
        )
    ),
    "ministral": Sentence(),
    "ministral3": Sentence(queries_grow=True),
    "mistral": Sentence(),
    "mistral4": replace(
        _DEEPSEEK,
        queries_grow=True,
        mixture=MixtureSentence("mlp.gate", "mlp.experts", shared="mlp.shared_experts"),
    ),
    "mixtral": Sentence(
        mixture=MixtureSentence(
            "block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2", scores=Scoring.SOFTMAX_OF_CHOSEN
        )
    ),
    "muse_glimmer_text": Sentence(
        NormOrder.SANDWICH,
        norm_offset=1.0,
        final_norm_offset=0.0,
        embedding_is_normed=True,
        head_gate=HeadGate.SIGMOID,
        gate="self_attn.gate_proj",
    ),
    "nemotron_h": Sentence(
        feed_forward="mixer",
        feeds_ungated=True,
        attention="mixer",
        before_attention="norm",
        between="norm",
        attention_output="mixer.o_proj",
        embedding="embeddings",
        final_norm="norm_f",
        recurrence=RecurrenceSentence("mixer", is_space=True),
        mixture=MixtureSentence(
            "mixer.gate",
            "mixer.experts",
            shared="mixer.shared_experts",
            scores=Scoring.SIGMOID,
            latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
        ),
    ),
    "nemotron": Sentence(norm_offset=1.0, norms_subtract_mean=True, norms_add_biases=True, feeds_ungated=True),
    "nemotron-nas": Sentence(),
    "olmo": Sentence(norms_subtract_mean=True, norms_have_weights=False),
    "olmo2": Sentence(NormOrder.AFTER),
    "olmo3": Sentence(NormOrder.AFTER),
    "olmoe": Sentence(mixture=MixtureSentence("mlp.gate", "mlp.experts")),
    "opt": Sentence(
        norms_subtract_mean=True,
        norms_add_biases=True,
        feeds_ungated=True,
        positions="embed_positions",
        first_position=2,
        before_attention="self_attn_layer_norm",
        between="final_layer_norm",
        attention_output="self_attn.out_proj",
        feed_forward="",
        dense=("fc1", "fc1", "fc2"),
        final_norm="final_layer_norm",
    ),
    "paddleocr_vl_text": Sentence(),
    "phi": Sentence(
        NormOrder.PARALLEL,
        norms_subtract_mean=True,
        norms_add_biases=True,
        feeds_ungated=True,
        dense=("fc1", "fc1", "fc2"),
        attention_output="self_attn.dense",
        final_norm="final_layernorm",
    ),
    "phimoe": Sentence(
        norms_subtract_mean=True,
        norms_add_biases=True,
        mixture=MixtureSentence(
            "block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2", scores=Scoring.SPARSE_MIXER
        ),
    ),
    "phi3": Sentence(qkv="self_attn.qkv_proj", dense_joined=("gate_up_proj", "down_proj")),
    "qwen2": Sentence(),
    "qwen2_5_vl_text": Sentence(),
    "qwen2_vl_text": Sentence(),
    "qwen2_moe": Sentence(mixture=_QWEN_MIXTURE),
    "qwen3": Sentence(),
    "qwen3_moe": Sentence(mixture=MixtureSentence("mlp.gate", "mlp.experts")),
    "qwen3_next": Sentence(
        norm_offset=1.0,
        head_gate=HeadGate.SIGMOID,
        gates_in_queries=True,
        recurrence=RecurrenceSentence(is_fused=True),
        mixture=_QWEN_MIXTURE,
    ),
    "qwen3_5_text": Sentence(
        norm_offset=1.0, head_gate=HeadGate.SIGMOID, gates_in_queries=True, recurrence=RecurrenceSentence()
    ),
    "qwen3_5_moe_text": Sentence(
        norm_offset=1.0,
        head_gate=HeadGate.SIGMOID,
        gates_in_queries=True,
        recurrence=RecurrenceSentence(),
        mixture=replace(_QWEN_MIXTURE, scores=Scoring.SOFTMAX_OF_CHOSEN),
    ),
    "qwen3_vl_text": Sentence(),
    "qwen3_vl_moe_text": Sentence(mixture=MixtureSentence("mlp.gate", "mlp.experts", scores=Scoring.SOFTMAX_OF_CHOSEN)),
    "seed_oss": Sentence(),
    "smollm3": Sentence(),
    "solar_open": Sentence(
        mixture=MixtureSentence("mlp.gate", "mlp.experts", shared="mlp.shared_experts", scores=Scoring.SIGMOID),
    ),
    "stablelm": Sentence(NormOrder.AS_CONFIGURED, norms_subtract_mean=True, norms_add_biases=True),
    "starcoder2": Sentence(
        norms_subtract_mean=True, norms_add_biases=True, feeds_ungated=True, dense=("c_fc", "c_fc", "c_proj")
    ),
    "step3p5": Sentence(
        norm_offset=1.0,
        head_gate=HeadGate.SIGMOID,
        mixture=MixtureSentence(
            "moe.gate",
            "moe",
            shared="share_expert",
            scores=Scoring.SIGMOID,
            correction="moe.router_bias",
            is_stacked=True,
        ),
    ),
    "youtu": Sentence(rotates_neighbours=True),
}
