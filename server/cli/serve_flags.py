"""The flags of `hallmark serve`: one for each setting, in groups."""

import argparse
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from qualification.common.flags import Commands, add_command
from server.errors import SettingsError
from server.settings import Settings, flag_of

_POSITIONAL = "positional_model"
_NAMES = "served_model_name"
_LAST = "more"  # of a setting that no group names
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "model": (
        "config", "model", "revision", "served_model_name", "tensor_parallel_size", "task", "matryoshka",
        "load_format", "device", "dtype", "kv_cache_dtype", "kv_cache_dtype_skip_layers",
        "max_model_len", "generation_config", "seed",
    ),
    "address, keys and hosts": (
        "host", "port", "admin_port", "root_path", "api_key_file", "operator_key_file", "allowed_hosts",
        "allowed_origins", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers",
    ),
    "text, tools and reasoning": ("special_tokens_in_text", "tool_call_parser", "reasoning_parser"),
    "batches and memory": (
        "max_num_seqs", "max_num_batched_tokens", "max_num_interleaved_tokens", "max_num_batched_image_tokens",
        "max_image_tokens", "page_size", "kv_cache_tokens",
        "gpu_memory_utilization", "prefix_caching", "mamba_ssm_cache_dtype", "state_snapshots",
        "speculative_config", "speculative_tokens",
        "cuda_graphs", "run_ahead", "choose_matmuls",
    ),
    "proof": (
        "on_unproven", "reproducible", "matrix", "cache_dir", "attestation_interval_s", "shadow_budget",
        "shadow_interval_s",
    ),
    "receipts": ("receipts", "receipt_token_ids", "receipt_key_file"),
    "limits of requests": (
        "max_queued_requests", "max_queued_tokens", "max_queued_bytes", "max_body_bytes", "receive_timeout_s",
        "limit_images", "max_image_pixels", "allowed_media_hosts", "request_timeout_s",
        "shutdown_grace_s", "key_requests_per_minute", "key_tokens_per_minute",
        "response_store_entries", "response_store_bytes",
    ),
    "logs, metrics and traces": ("log_format", "metrics_compat", "otlp_endpoint", "trace_ratio", "slo_file"),
}  # fmt: skip


def add_parser(commands: Commands) -> None:
    """Add `hallmark serve` to the commands of the program."""
    add_arguments(
        add_command(
            commands,
            "serve",
            "serve a model over HTTP",
            "Serve a model over HTTP as OpenAI's API does. Each flag is also a variable: --max-num-seqs is "
            "HALLMARK_MAX_NUM_SEQS, of the environment or the current folder's file .env, and max-num-seqs in the file "
            "of --config. The first of these wins.",
            "hallmark serve",
            "hallmark serve ~/models/Qwen3-8B --port 8123 --api-key-file keys.txt",
            "hallmark serve Qwen/Qwen3-8B --revision main --on-unproven refuse",
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of Settings; values stay texts, which `read_settings` reads as it reads variables."""
    parser.add_argument(_POSITIONAL, nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model")
    group_of = {name: title for title, names in _GROUPS.items() for name in names}
    groups = {title: parser.add_argument_group(title) for title in (*_GROUPS, _LAST)}
    for field in msgspec.structs.fields(Settings):
        description, metavar = _documented(field.type)
        default = "" if field.default is None else f" (default: {_text(field.default)})"
        options: dict[str, Any] = {"action": _Switch} if _is_switch(field.type) else {"metavar": metavar}
        if field.name == _NAMES:
            options = {"metavar": "NAME", "nargs": "+"}  # as vLLM's flag, or one value with commas
        groups[group_of.get(field.name, _LAST)].add_argument(
            flag_of(field.name),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=(description + default).replace("%", "%%"),
            **options,
        )


def texts_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the flags that were given, by field of Settings. Raises SettingsError for a model that is given twice."""
    texts = {name: text for name, text in vars(arguments).items() if name != "command"}
    model = texts.pop(_POSITIONAL, None)
    names = texts.pop(_NAMES, [])
    if len(names) > 1 and model is None and "model" not in texts:
        flag = flag_of(_NAMES)
        raise SettingsError(
            f"{flag} {' '.join(names)}: the last of these may be a name or the model; write MODEL before {flag}, or "
            f"names with commas ({','.join(names)})"
        )
    if names:
        texts[_NAMES] = ",".join(names)
    if model is not None and texts.setdefault("model", model) != model:
        raise SettingsError(f"two models are given, {model} and --model {texts['model']}: a server has one")
    return texts


class _Switch(argparse.BooleanOptionalAction):
    """`--name` and `--no-name`, kept as the text that a variable would hold."""

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, _values: object, option_string: str | None = None
    ) -> None:
        is_off = option_string is not None and option_string.startswith("--no-")
        setattr(namespace, self.dest, "false" if is_off else "true")


def _is_switch(annotation: object) -> bool:
    return getattr(annotation, "__origin__", annotation) is bool


def _documented(annotation: object) -> tuple[str, str]:
    """A setting's description, and what stands for its value in the help text."""
    kind = getattr(annotation, "__origin__", annotation)
    meta = getattr(annotation, "__metadata__", (msgspec.Meta(description=""),))[-1]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return meta.description or "", "{" + ",".join(member.value for member in kind) + "}"
    return meta.description or "", "VALUE"


def _text(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default.value if isinstance(default, Enum) else default)
