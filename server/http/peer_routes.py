"""Paths of other servers, each with the path here that does the same."""

from collections.abc import Collection, Mapping

_MODELS = "/v1/models"
_CHAT = "/v1/chat/completions"
OTHER_PATHS: Mapping[str, str] = {
    "/api/chat": _CHAT,  # Ollama
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/api/generate": "/v1/completions",
    "/api/ps": _MODELS,
    "/api/show": _MODELS,
    "/api/tags": _MODELS,
    "/api/version": "/version",
    "/apply-template": "/tokenize",  # llama.cpp
    "/completion": "/v1/completions",
    "/embedding": "/v1/embeddings",
    "/props": _MODELS,
    "/slots": "/load",
    "/embed": "/v1/embeddings",  # TEI and TGI
    "/generate": "/v1/completions",  # SGLang's too
    "/generate_stream": "/v1/completions",
    "/info": _MODELS,
    "/invocations": _CHAT,  # SageMaker, vLLM
    "/encode": "/v1/embeddings",  # SGLang
    "/get_load": "/load",
    "/get_model_info": _MODELS,
    "/get_server_info": "/version",
    "/health_generate": "/readyz",
    "/model_info": _MODELS,
    "/server_info": "/version",
    "/v1/loads": "/load",
    "/pooling": "/v1/embeddings",  # vLLM
    "/v2/embed": "/v1/embeddings",  # Cohere
}
_VERSION = "/v1"


def path_here(path: str, known: Collection[str]) -> str | None:
    """The path of `known` that does what another server's `path` does, or a client's whose base URL is not quite ours.

    OpenAI's clients are to have a base URL that ends with /v1, Anthropic's one without.
    """
    candidates = (OTHER_PATHS.get(path), _VERSION + path, path.removeprefix(_VERSION))
    return next((it for it in candidates if it in known and it != path), None)
