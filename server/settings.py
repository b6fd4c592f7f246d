"""Every setting of the server, read once from flags and HALLMARK_* variables. Nobody else reads the environment."""

from enum import Enum
from pathlib import Path

import msgspec

from qualification.decision import Policy

DEMO_MODEL = Path(__file__).parent / "model" / "demo"


class DeviceChoice(Enum):
    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


class DtypeChoice(Enum):
    AUTO = "auto"  # the checkpoint's own on CUDA (fp32 becomes bf16), fp32 on a CPU
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class LoadFormat(Enum):
    AUTO = "auto"
    DUMMY = "dummy"  # random weights of the model's shapes


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field `max_model_len` is flag `--max-model-len` and variable `HALLMARK_MAX_MODEL_LEN`; the flag wins."""

    model: str = str(DEMO_MODEL)
    served_model_name: str | None = None  # default: the folder's name
    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int | None = None  # None: /metrics and admin routes share the main port
    device: DeviceChoice = DeviceChoice.AUTO
    dtype: DtypeChoice = DtypeChoice.AUTO
    kv_dtype: DtypeChoice = DtypeChoice.AUTO  # auto: the model's dtype
    max_model_len: int | None = None  # tokens of prompt and completion; default: the model's own limit
    max_num_seqs: int | None = None  # running at once; default 256 on CUDA, 16 on a CPU
    max_num_batched_tokens: int | None = None  # tokens a step; default 8192 on CUDA, 2048 on a CPU
    max_queued_requests: int = 512
    max_queued_tokens: int = 2_000_000
    page_size: int | None = None  # tokens; default 64 on CUDA, 16 on a CPU
    kv_cache_tokens: int | None = None  # default: what the memory takes on CUDA, 65536 on a CPU
    gpu_memory_utilization: float = 0.9
    load_format: LoadFormat = LoadFormat.AUTO
    on_unproven: Policy = Policy.QUALIFY
    matrix: str | None = None  # folder; default: those that ship in qualification/matrices
    cache_dir: str | None = None  # evidence of this machine; default ~/.cache/hallmark
    api_key_file: str | None = None
    otlp_endpoint: str | None = None
    seed: int = 0
