"""Flags of vLLM, SGLang and TGI that mean something here: under another name, or without a flag."""

from collections.abc import Iterable, Mapping, Sequence

OTHER_NAMES: Mapping[str, str] = {
    "--allowed-media-domains": "--allowed-media-hosts",
    "--api-key": "--api-key-file",
    "--block-size": "--page-size",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--convert": "--task",
    "--cuda-memory-fraction": "--gpu-memory-utilization",
    "--disable-cuda-graph": "--no-cuda-graphs",
    "--disable-radix-cache": "--no-prefix-caching",
    "--enable-prefix-caching": "--prefix-caching",
    "--enforce-eager": "--no-cuda-graphs",
    "--hostname": "--host",
    "--kv-cache-memory-bytes": "--kv-cache-tokens",
    "--limit-mm-per-prompt": "--limit-images",
    "--max-concurrent-requests": "--max-queued-requests",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--model-id": "--model",
    "--model-path": "--model",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--num-shard": "--tensor-parallel-size",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--random-seed": "--seed",
    "--runner": "--task",
    "--shutdown-timeout": "--shutdown-grace-s",
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
}
_NO_ADAPTERS = "adapters are not implemented"
_NO_OVERRIDES = "what config.json says is served; change the copy in the model's folder"
_NO_LEVELS = "the log has one level, --log-format chooses its form"
WITHOUT_FLAG: Mapping[str, str] = {
    "--attention-backend": "the plan chooses the kernels by their proofs, `hallmark doctor` lists them",
    "--async-scheduling": "on a GPU steps are always planned ahead (--no-run-ahead: never)",
    "--chat-template": "the template is the model folder's own",
    "--compilation-config": "nothing is compiled by torch.compile, --no-cuda-graphs does without graphs",
    "--cpu-offload-gb": "weights stay in the GPU's memory, --tensor-parallel-size shares them",
    "--data-parallel-size": "run several servers (docs/ray.md, docs/routers.md)",
    "-dp": "run several servers (docs/ray.md, docs/routers.md)",
    "--disable-log-stats": "no figures are logged, /metrics has them",
    "--disable-log-requests": "prompts and answers are never logged",
    "--enable-auto-tool-choice": "tools are always on (--tool-call-parser chooses their format)",
    "--enable-chunked-prefill": "long prompts are always computed in chunks (--max-num-batched-tokens)",
    "--enable-expert-parallel": "every rank has columns of every expert (--tensor-parallel-size)",
    "--enable-lora": _NO_ADAPTERS,
    "--enable-log-requests": "prompts and answers are never logged",
    "--hf-overrides": _NO_OVERRIDES,
    "--log-level": _NO_LEVELS,
    "--lora-adapters": _NO_ADAPTERS,
    "--lora-modules": _NO_ADAPTERS,
    "--lora-paths": _NO_ADAPTERS,
    "--max-lora-rank": _NO_ADAPTERS,
    "--max-loras": _NO_ADAPTERS,
    "--no-enable-log-requests": "prompts and answers are never logged",
    "-pp": "only --tensor-parallel-size shares a model among GPUs",
    "--pipeline-parallel-size": "only --tensor-parallel-size shares a model among GPUs",
    "--rope-scaling": _NO_OVERRIDES,
    "--swap-space": "pages of preempted sequences are computed again",
    "--enable-ssl-refresh": "SIGHUP reads the certificate again",
    "--ssl-keyfile-password": "the key's file has no passphrase, its mode protects it",
    "--tokenizer": "the tokenizer is the model folder's own",
    "--trust-remote-code": "no code of a model's folder is ever run",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks (--max-num-batched-tokens)",
    "--download-dir": "HF_HOME names the folder of what is fetched",
    "--distributed-executor-backend": "the ranks are processes of one host (--tensor-parallel-size)",
    "--uvicorn-log-level": _NO_LEVELS,
}


def advice(names: Iterable[str], known: Sequence[str]) -> str:
    """Return what stands here for these flags, of a command with the flags `known`; empty where there is nothing."""
    found = []
    for name in names:
        if OTHER_NAMES.get(name) in known:
            found.append(f"{name} is {OTHER_NAMES[name]} here")
        elif name in WITHOUT_FLAG:
            found.append(f"leave out {name}: {WITHOUT_FLAG[name]}")
    return "".join(f"; {text}" for text in found)
