"""Every setting of the server, read once from flags, HALLMARK_* variables and files. No other file reads these."""

import difflib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from qualification.common.flags import DTYPE_NAMES
from qualification.decision.decision import Policy
from server.errors import SettingsError
from server.setting_files import NO_ENV_FILE, EnvFile, GivenSetting, read_config

DEMO_MODEL = Path(__file__).parent / "model" / "demo"
PREFIX = "HALLMARK_"


class DeviceChoice(Enum):
    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class DtypeChoice(Enum):
    AUTO = "auto"  # the checkpoint's own on CUDA (fp32 becomes bf16), fp32 on a CPU
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def _missing_(cls, value: object) -> "DtypeChoice | None":
        """Take vLLM's names, which are torch's, too."""
        ours = DTYPE_NAMES.get(value) if isinstance(value, str) else None
        return None if ours is None else cls(ours)


class CacheDtype(Enum):
    AUTO = "auto"  # as the checkpoint says how its cache is quantised, else the model's
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    @classmethod
    def _missing_(cls, value: object) -> "CacheDtype | None":
        """Take vLLM's names too."""
        if value == "fp8_e4m3":
            return cls.FP8
        ours = DTYPE_NAMES.get(value) if isinstance(value, str) else None
        return None if ours is None else cls(ours)


class LoadFormat(Enum):
    AUTO = "auto"
    DUMMY = "dummy"  # random weights of the model's shapes

    @classmethod
    def _missing_(cls, value: object) -> "LoadFormat | None":
        """Take vLLM's name of the one format that is read."""
        return cls.AUTO if value == "safetensors" else None


class Quantization(Enum):
    AUTO = "auto"  # as the checkpoint is
    FP8 = "fp8"


class GenerationConfig(Enum):
    AUTO = "auto"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> "GenerationConfig | None":
        """Take vLLM's name for sampling that the model's file does not choose."""
        return cls.NONE if value == "vllm" else None


class ToolCallParser(Enum):
    """Format in which a model writes calls of tools, by vLLM's names where it has one."""

    AUTO = "auto"
    HERMES = "hermes"
    QWEN3_CODER = "qwen3_coder"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    HARMONY = "openai"
    GEMMA = "gemma4"
    GLM45 = "glm45"
    GLM47 = "glm47"
    POOLSIDE_V1 = "poolside_v1"
    HY_V3 = "hy_v3"
    MINIMAX_M2 = "minimax_m2"
    SEED_OSS = "seed_oss"
    STEP3P5 = "step3p5"
    MIMO = "mimo"
    KIMI_K2 = "kimi_k2"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    DEEPSEEK_V32 = "deepseek_v32"
    FUNCTIONARY_V31 = "functionary_v3.1"
    FUNCTIONARY_V32 = "functionary_v3.2"
    GRANITE = "granite"
    PHI4_MINI = "phi4_mini_json"
    HUNYUAN_A13B = "hunyuan_a13b"
    HUNYUAN_DENSE = "hunyuan_dense"
    COHERE3 = "cohere_command3"
    COHERE4 = "cohere_command4"
    NEMOTRON_JSON = "nemotron_json"
    PYTHONIC = "pythonic"
    LFM2 = "lfm2"
    OLMO3 = "olmo3"


class ReasoningParser(Enum):
    """Format in which a model marks its reasoning, by vLLM's names."""

    AUTO = "auto"
    NONE = "none"
    THINK = "qwen3"
    THINK_FIRST = "deepseek_r1"  # an answer begins with reasoning even where no tag says so
    MISTRAL = "mistral"
    HARMONY = "openai_gptoss"
    GEMMA = "gemma4"
    GLM45 = "glm45"
    MINIMAX_M2 = "minimax_m2"
    NEMOTRON_V3 = "nemotron_v3"
    KIMI_K2 = "kimi_k2"
    DEEPSEEK_V3 = "deepseek_v3"
    POOLSIDE_V1 = "poolside_v1"
    STEP3P5 = "step3p5"
    GRANITE = "granite"
    SEED_OSS = "seed_oss"
    HY_V3 = "hy_v3"
    HUNYUAN_A13B = "hunyuan_a13b"
    COHERE3 = "cohere_command3"
    COHERE4 = "cohere_command4"


class Task(Enum):
    """Task that a model is served for."""

    AUTO = "auto"
    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class ReceiptMode(Enum):
    """Answers that come with a signed receipt."""

    ON_REQUEST = "on_request"
    ALWAYS = "always"
    OFF = "off"


class MetricsCompat(Enum):
    NONE = "none"
    VLLM = "vllm"


class LogFormat(Enum):
    AUTO = "auto"
    LINE = "line"
    JSON = "json"


# An integer beyond int64 could not be sent to the engine, which would be started again for ever.
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Limit = Annotated[float, Meta(gt=0, le=86_400)]  # seconds; with a limit of 0 no request is ever answered


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field `max_model_len` is flag `--max-model-len` and variable `HALLMARK_MAX_MODEL_LEN`; the flag wins."""

    config: Annotated[
        str | None,
        Meta(
            description="TOML or YAML file of settings by name, such as `port = 8123`; flags and variables win over it"
        ),
    ] = None
    model: Annotated[str, Meta(description="folder or hub id of the model")] = str(DEMO_MODEL)
    revision: Annotated[
        Annotated[str, Meta(pattern=r"^\S+$")] | None,
        Meta(description="branch, tag or commit of a hub id; a commit pins it (default: the main branch)"),
    ] = None
    served_model_name: Annotated[
        Annotated[str, Meta(pattern=r"^\s*[^,\s][^,]*(,\s*[^,\s][^,]*)*$")] | None,
        Meta(
            description="name in the API, or several separated by commas, of which answers and metrics have the first "
            "(default: the folder's name, or the hub id)"
        ),
    ] = None
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port of the API; 0 takes a free one")] = 8000
    admin_port: Annotated[
        Port | None,
        Meta(description="port of /metrics and /attention; default: the API's own, behind an operator's key"),
    ] = None
    task: Annotated[
        Task,
        Meta(
            description="what the model is for: text, embeddings of its last token, or scores of documents by yes and "
            "no (Qwen3-Reranker); auto: as sentence-transformers' modules.json or an architecture without head says, "
            "else generate"
        ),
    ] = Task.AUTO
    matryoshka: Annotated[
        bool,
        Meta(description="allow `dimensions` of embeddings also where config.json does not say that the model does"),
    ] = False
    device: Annotated[DeviceChoice, Meta(description="where the model runs")] = DeviceChoice.AUTO
    dtype: Annotated[
        DtypeChoice,
        Meta(
            description="of weights and activations, also as torch names them; auto: the checkpoint's on CUDA, fp32 on "
            "a CPU"
        ),
    ] = DtypeChoice.AUTO
    kv_cache_dtype: Annotated[
        CacheDtype,
        Meta(
            description="of the KV cache; fp8: e4m3 with a scale for each token and KV head, computed when they are "
            "written (docs/quantization.md says what it costs); auto: fp8 where the checkpoint says so, else the "
            "model's dtype"
        ),
    ] = CacheDtype.AUTO
    kv_cache_dtype_skip_layers: Annotated[
        Annotated[str, Meta(pattern=r"^\s*[^,\s]+\s*(,\s*[^,\s]+\s*)*$")] | None,
        Meta(
            description="layers whose keys and values an fp8 cache keeps in the model's dtype: numbers from 0, "
            "separated by commas, and sliding_window for all that have a window (default: none)"
        ),
    ] = None
    quantization: Annotated[
        Quantization,
        Meta(
            description="fp8: round the products of a checkpoint that is not quantised, those of experts too, to 8 "
            "bits while it is loaded, weights by row, inputs by token; auto: the weights are as the checkpoint has them"
        ),
    ] = Quantization.AUTO
    generation_config: Annotated[
        GenerationConfig,
        Meta(
            description="sampling where a request leaves it open; auto: as generation_config.json says, none: OpenAI's"
        ),
    ] = GenerationConfig.AUTO
    special_tokens_in_text: Annotated[
        bool,
        Meta(
            description="let a chat message's text spell special tokens, as vLLM does: whoever writes one can then end "
            "the message and begin another in any role"
        ),
    ] = False
    tool_call_parser: Annotated[
        ToolCallParser,
        Meta(description="how the model writes calls of tools; auto: as its chat template shows, else hermes"),
    ] = ToolCallParser.AUTO
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(description="how the model marks its reasoning; auto: as its chat template shows; none: it is content"),
    ] = ReasoningParser.AUTO
    max_model_len: Annotated[
        Count | None,
        Meta(
            description="tokens of prompt and completion (default: the model's own limit, or what the KV cache holds)"
        ),
    ] = None
    max_num_seqs: Annotated[
        Count | None,
        Meta(
            description="sequences running at once (default: 256 on CUDA, 16 on a CPU; fewer where half of the memory "
            "beside the weights does not hold their recurrent states)"
        ),
    ] = None
    mamba_ssm_cache_dtype: Annotated[
        DtypeChoice,
        Meta(
            description="fp32 or bf16: of the states of recurrent layers, which bf16 makes a third smaller "
            "(docs/experiments/recurrence.md says what it costs); auto: as config.json says, fp32 where it says nothing"
        ),
    ] = DtypeChoice.AUTO
    state_snapshots: Annotated[
        Count | None,
        Meta(
            description="slots, of a model with recurrent layers, for copies of states at page borders, from which "
            "prompts that begin alike go on (default: as many as sequences that run at once, as far as half of the "
            "memory beside the weights holds both)"
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        Meta(
            description="tokens drafted for each sequence and verified in one step, as JSON of vLLM's format: "
            "method (ngram: what followed the newest tokens where they stood before; mtp: by the model's own draft "
            "head), num_speculative_tokens (1 to 4, by mtp to 3), disable_by_batch_size (decoding sequences from which "
            "on none is drafted; default: 33 for mtp, none for ngram), prompt_lookup_min and prompt_lookup_max (of "
            "ngram, tokens that must be alike; default: 5) (default: none)"
        ),
    ] = None
    speculative_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=3)] | None,
        Meta(
            description="tokens that the model's own draft head (MTP) drafts for each sequence and step, of Qwen 3 "
            "Next and Qwen 3.5: 1 to 3 (default: none)"
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        Count | None, Meta(description="tokens a step (default: 8192 on CUDA, 2048 on a CPU)")
    ] = None
    max_num_interleaved_tokens: Annotated[
        Count | None,
        Meta(
            description="prompt tokens a step while other requests stream, which bounds the time between their tokens "
            "(default: on CUDA 2048 for an 8B, more for a smaller model; 512 on a CPU)"
        ),
    ] = None
    max_image_tokens: Annotated[
        Count | None,
        Meta(
            description="tokens of images, of prompts that are computed, whose embeddings are kept; a prompt's images "
            "have at most so many (default: 16384, or --max-model-len where that is less)"
        ),
    ] = None
    max_num_batched_image_tokens: Annotated[
        Count | None,
        Meta(
            description="tokens of images a step that the tower computes, an image at least (default: as "
            "--max-num-interleaved-tokens)"
        ),
    ] = None
    max_queued_requests: Annotated[Count, Meta(description="requests that may wait for their first token")] = 512
    max_queued_tokens: Annotated[Count, Meta(description="prompt tokens that may wait for their first token")] = (
        2_000_000
    )
    max_queued_bytes: Annotated[
        Count,
        Meta(
            description="bytes of requests that may arrive, or wait to be parsed, at once; likewise of resized images "
            "that wait for a first token"
        ),
    ] = 256 * 1024 * 1024
    response_store_entries: Annotated[
        Annotated[int, Meta(ge=0, le=2**63 - 1)],
        Meta(description="answers of /v1/responses that are kept to be continued; the oldest makes room. 0: none"),
    ] = 1000
    response_store_bytes: Annotated[Count, Meta(description="bytes that these answers and their inputs may take")] = (
        64 * 1024 * 1024
    )
    page_size: Annotated[
        Count | None, Meta(description="tokens a page of the KV cache (default: 64 on CUDA, 16 on a CPU)")
    ] = None
    kv_cache_tokens: Annotated[
        Count | None, Meta(description="size of the KV cache (default: what fits on CUDA, 65536 on a CPU)")
    ] = None
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)], Meta(description="share of the GPU's memory to use")
    ] = 0.9
    tensor_parallel_size: Annotated[
        Count, Meta(description="ranks that share the model, each with a GPU of its own: 1, 2, 4 or 8")
    ] = 1
    prefix_caching: Annotated[
        bool, Meta(description="keep computed pages, and compute no prompt's beginning twice; each API key has its own")
    ] = True
    cuda_graphs: Annotated[
        bool,
        Meta(description="replay decode steps and short prompts as CUDA graphs, captured before ready; costs memory"),
    ] = True
    run_ahead: Annotated[
        bool, Meta(description="plan and launch a step while the GPU computes the one before; a CPU never does")
    ] = True
    compile_jobs: Annotated[
        Annotated[int, Meta(ge=0, le=1024)] | None,
        Meta(
            description="processes that compile the plan's kernels while the weights load, as far as Triton's cache "
            "lacks them; 32 at most; 0: each kernel is compiled where it is first launched (default: one a core); CUDA "
            "only"
        ),
    ] = None
    choose_matmuls: Annotated[
        bool,
        Meta(
            description="measure, before ready, which of cuBLASLt's algorithms multiplies many rows fastest; CUDA only"
        ),
    ] = True
    load_format: Annotated[LoadFormat, Meta(description="dummy: random weights, for benches")] = LoadFormat.AUTO
    on_unproven: Annotated[
        Policy,
        Meta(
            description="a shape without valid proof: refuse (never ready), qualify (prove it at start-up) or degrade "
            "(serve on the fallback, counted)"
        ),
    ] = Policy.QUALIFY
    reproducible: Annotated[
        bool,
        Meta(
            description="make the bits of an answer depend on its own tokens, the weights, the software and the kind "
            "of processor alone: kernel paths whose sums depend on the batch serve nothing"
        ),
    ] = False
    attestation_interval_s: Annotated[
        Seconds,
        Meta(description="between two attestations of the kernels that forward passes launch; 0: never, unless asked"),
    ] = 600.0
    layer_check: Annotated[
        bool,
        Meta(
            description="before ready, hold each layer to the plain forward pass of the checkpoint's own tensors, "
            "unless an earlier start has"
        ),
    ] = True
    shadow_budget: Annotated[
        Annotated[float, Meta(ge=0, le=0.5)],
        Meta(description="share of the time for computing again in fp64 what was served; 0: never"),
    ] = 0.005
    shadow_interval_s: Annotated[
        Seconds, Meta(description="between two of these checks; less for 60 s after one that failed")
    ] = 10.0
    replay_share: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="share of the answers that are computed again alone when the engine is idle, and compared; 0: "
            "none (default: as many as shadow_budget pays for)"
        ),
    ] = None
    matrix: Annotated[str | None, Meta(description="folder of the matrices (default: those that ship)")] = None
    cache_dir: Annotated[
        str | None, Meta(description="folder of this machine's own evidence (default: ~/.cache/hallmark)")
    ] = None
    receipts: Annotated[
        ReceiptMode,
        Meta(description="signed receipts of answers: on_request, where a request has `receipt: true`; always; or off"),
    ] = ReceiptMode.ON_REQUEST
    receipt_token_ids: Annotated[
        bool,
        Meta(
            description="put token ids, seeds and what else repeats a request into receipts, so that answers can be "
            "computed again; without them there are digests only"
        ),
    ] = True
    receipt_key_file: Annotated[
        str | None,
        Meta(
            description="PEM file of the Ed25519 key that signs receipts, of mode 0600, read again on SIGHUP (default: "
            "receipt_key.pem in the cache folder, made at the first start and made anew on SIGHUP)"
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        Meta(
            description="file of API keys, one a line as KEY or NAME:KEY, read again on SIGHUP; without it no "
            "request needs a key"
        ),
    ] = None
    operator_key_file: Annotated[
        str | None,
        Meta(
            description="file of operators' keys, likewise, which open everything; /metrics, /attention and /version "
            "need one where there are API keys and no admin port"
        ),
    ] = None
    key_requests_per_minute: Annotated[
        Count | None, Meta(description="requests a minute of each API key (default: no limit)")
    ] = None
    key_tokens_per_minute: Annotated[
        Count | None, Meta(description="tokens of prompts and answers a minute of each API key (default: no limit)")
    ] = None
    allowed_origins: Annotated[
        str | None,
        Meta(
            description="origins of web pages that may call the API from a browser (CORS), separated by commas, or * "
            "for any, which is refused where there are API keys (default: none)"
        ),
    ] = None
    root_path: Annotated[str | None, Meta(description="path under which a proxy offers the API, such as /llm")] = None
    ssl_certfile: Annotated[
        str | None,
        Meta(
            description="PEM file of the certificate, and of those between it and its authority, for API and admin "
            "port, which speak TLS alone with it; read again on SIGHUP, as is the key (default: plain HTTP)"
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None, Meta(description="PEM file of the certificate's key (default: it is in the certificate's)")
    ] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="PEM file of the authorities that certificates of clients must come from")
    ] = None
    ssl_cert_reqs: Annotated[
        Annotated[int, Meta(ge=0, le=2)],
        Meta(description="certificates of clients: 0 not asked for, 1 checked where there is one, 2 needed"),
    ] = 0
    ssl_ciphers: Annotated[
        str | None, Meta(description="ciphers of TLS 1.2, as OpenSSL lists them (default: Python's)")
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Meta(
            description="host names that requests may ask for, separated by commas, or * for any (default: loopback "
            "names for a server on loopback without API keys, else any)"
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Meta(description="OTLP collector: http://host:4318, or grpc://host:4317 (extra `grpc`); without it no traces"),
    ] = None
    trace_ratio: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        Meta(description="share of traces to keep where the client does not say; errors and fallbacks are always kept"),
    ] = 1.0
    log_format: Annotated[
        LogFormat, Meta(description="of standard error; auto: lines on a terminal, JSON anywhere else")
    ] = LogFormat.AUTO
    metrics_compat: Annotated[
        MetricsCompat,
        Meta(description="vllm: show the load under vLLM's metric names too, which routers read (docs/routers.md)"),
    ] = MetricsCompat.NONE
    slo_file: Annotated[
        str | None,
        Meta(description="TOML or JSON file of service level objectives (default: those of docs/metrics.md)"),
    ] = None
    max_body_bytes: Annotated[Count, Meta(description="largest request body, or image that is fetched")] = (
        8 * 1024 * 1024
    )
    limit_images: Annotated[
        Annotated[int, Meta(ge=0, le=1024)], Meta(description="images that a prompt may have; 0: none")
    ] = 16
    max_image_pixels: Annotated[
        Annotated[int, Meta(ge=1, le=89_478_485)],
        Meta(description="pixels of an image as it comes; a larger one is refused by its header"),
    ] = 50_000_000
    allowed_media_hosts: Annotated[
        Annotated[str, Meta(pattern=r"^\s*[^,\s]+\s*(,\s*[^,\s]+\s*)*$")] | None,
        Meta(
            description="hosts, separated by commas, that images are fetched from where a request has their URL "
            "(default: none; images come as data: URLs)"
        ),
    ] = None
    receive_timeout_s: Annotated[Limit, Meta(description="longest time a client may take to send a request")] = 30.0
    request_timeout_s: Annotated[Limit, Meta(description="longest time a request may take to be answered")] = 3600.0
    shutdown_grace_s: Annotated[
        Seconds, Meta(description="time that running requests have to finish after SIGTERM")
    ] = 30.0
    seed: Annotated[Seed, Meta(description="of everything that is drawn at random")] = 0

    @property
    def cache_path(self) -> Path:
        """The folder of what this machine keeps for the next start."""
        return Path.home() / ".cache" / "hallmark" if self.cache_dir is None else Path(self.cache_dir)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may call the model by."""
        if self.served_model_name is None:
            return (Path(self.model).absolute().name,)  # of . too
        return tuple(dict.fromkeys(name.strip() for name in self.served_model_name.split(",")))

    @property
    def model_name(self) -> str:
        """The name of the model in answers and in metric labels."""
        return self.model_names[0]


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def read_settings(flags: Mapping[str, str], environ: Mapping[str, str], env_file: EnvFile = NO_ENV_FILE) -> Settings:
    """Settings of `flags` (by field name, texts as typed), over HALLMARK_* variables, over those of a file `.env`, over
    the file that `config` names.

    Raises SettingsError, which names the flag, variable or key, for an unknown one or an unparsable value.
    """
    known = {field.encode_name: field.type for field in msgspec.structs.fields(Settings)}
    given = _variables(known, env_file.variables, f"{env_file.path}: ") | _variables(known, environ)
    given |= {name: GivenSetting(flag_of(name), text) for name, text in flags.items()}
    if "config" in given:
        config = _parse(given["config"], known["config"])
        given = read_config(Path(config), known) | given
    return Settings(**{name: _parse(each, known[name]) for name, each in given.items()})


def _variables(known: Mapping[str, object], environ: Mapping[str, str], where: str = "") -> dict[str, GivenSetting]:
    """Return the variables that are settings; `where` precedes their names in errors."""
    found = {}
    for variable, text in environ.items():
        if not variable.upper().startswith(PREFIX):  # one of lower case is meant for this server, and would be ignored
            continue
        field = variable[len(PREFIX) :].lower()
        if field not in known or variable != variable.upper():
            close = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {PREFIX}{close[0].upper()}?" if close else ""
            raise SettingsError(f"{where}{variable} is no setting{hint}")
        found[field] = GivenSetting(f"{where}{variable}", text)
    return found


def _parse(given: GivenSetting, kind: Any) -> Any:
    source, text = given.source, given.text
    if not text:  # as a host it would mean every interface, as a folder the current one
        raise SettingsError(f"{source} is empty; leave it out for the default")
    try:
        text.encode()
        return msgspec.convert(text, kind, strict=False)
    except UnicodeEncodeError:  # nor could it be sent to the engine
        raise SettingsError(f"{source}: Expected UTF-8, got {text!r}") from None
    except msgspec.ValidationError as error:
        choices = _choices(kind)
        wanted = (
            f"Expected one of {', '.join(choices)}" if choices else str(error).split(", got")[0].replace(" | null", "")
        )
        raise SettingsError(f"{source}: {wanted}, got {text!r}") from None


def _choices(kind: object) -> tuple[str, ...]:
    """The values of an enum (under its Annotated); empty for any other type."""
    kind = getattr(kind, "__origin__", kind)
    return tuple(member.value for member in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()
