"""Every error that Hallmark raises on purpose.

HallmarkError
|-- StartError                        ends the start; the command line prints its message and exits with 2
|   |-- SettingsError
|   |-- ModelError                    config, weights, tokenizer or chat template cannot be used
|   `-- LayersFailed                  the layers do not compute what the files say, under --on-unproven refuse
|-- RequestError                      4xx: the client can mend it
|   |-- InvalidHttp            400    invalid_http          what came is not HTTP/1.1
|   |-- InvalidHeader          400    invalid_header        Host or Authorization is missing, doubled or malformed
|   |-- InvalidJson            400    invalid_json
|   |-- UnknownField           400    unknown_field         a field that no version of the API has
|   |-- UnsupportedField       400    unsupported_field     a field of the API that is not implemented
|   |-- InvalidValue           400    invalid_value         wrong type, or outside the stated limits
|   |   |-- TemplateError      400    invalid_messages      the chat template refuses these messages
|   |   |   `-- TemplateRefusal                          it raises; else it was stopped at a limit
|   |   `-- InvalidGrammar     400    invalid_grammar       a schema, regex or grammar cannot bind an answer
|   |-- PromptTooLong          400    context_length_exceeded
|   |-- DeadlyPrompt           400    deadly_prompt         two engines died while they read it
|   |-- Unauthorized           401    invalid_api_key
|   |-- Forbidden              403    operator_key_needed   a tenant's key on an operators' route
|   |-- NotFound               404    not_found
|   |   |-- ModelNotFound      404    model_not_found
|   |   `-- ResponseNotFound   404    response_not_found    none of that id is stored for this key
|   |-- MethodNotAllowed       405    method_not_allowed    Allow
|   |-- Conflict               409    conflict              it contradicts the state of the server
|   |-- SlowClient             408    slow_client           the client was too slow to read
|   |-- RequestTimeout         408    request_timeout       the client was too slow to send
|   |-- TimeLimitReached       408    request_timeout       the request's own `timeout` has passed
|   |-- PayloadTooLarge        413    payload_too_large
|   |-- UnsupportedMediaType   415    unsupported_media_type
|   |-- HeadersTooLarge        431    headers_too_large
|   |-- RateLimited            429    rate_limit_exceeded   Retry-After; what an API key may use a minute
|   `-- TooManyRequests        429    too_many_requests     Retry-After
`-- ServiceError                      5xx: the server's fault or state
    |-- InternalError          500    internal_error        says nothing of what happened; the log does
    |-- NonFiniteLogits        500    nonfinite_logits
    |-- NotReady               503    not_ready             Retry-After
    |-- EngineDied             503    engine_died           Retry-After
    |-- ShuttingDown           503    shutting_down         Retry-After
    `-- DeadlineExceeded       504    deadline_exceeded

A message names the limit and the value. It never repeats a prompt.
"""

from typing import ClassVar

INTERNAL_MESSAGE = "The server failed while it answered this request; its log says more under the request id."
RETRY_AFTER_S = 5  # about what a restart takes when the evidence is cached


class HallmarkError(Exception):
    """`status`, `type` and `code` belong to the class; `message`, `param` and `retry_after_s` to the instance."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"  # as OpenAI names it
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the field of the request that is to blame
        self.retry_after_s = retry_after_s


class StartError(HallmarkError):
    code = "start_failed"


class SettingsError(StartError):
    code = "invalid_settings"


class ModelError(StartError):
    code = "invalid_model"


class LayersFailed(StartError):
    code = "layers_failed"


class RequestError(HallmarkError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidHttp(RequestError):
    """The connection does not speak HTTP/1.1; it is closed."""

    code = "invalid_http"


class InvalidHeader(RequestError):
    """A header such as Host or Authorization is missing, doubled or malformed."""

    code = "invalid_header"


class InvalidJson(RequestError):
    """The body is no JSON object, or one that is too deep, too large or ambiguous."""

    code = "invalid_json"


class UnknownField(RequestError):
    """A field that is not part of the API."""

    code = "unknown_field"


class UnsupportedField(RequestError):
    """A field that is known and not implemented."""

    code = "unsupported_field"


class InvalidValue(RequestError):
    """A value of a wrong type, or outside the stated limits."""

    code = "invalid_value"


class TemplateError(InvalidValue):
    """The model's chat template refuses these messages."""

    code = "invalid_messages"


class TemplateRefusal(TemplateError):
    """The template itself raises on these messages; others may be put in their place. No limit was met."""


class InvalidGrammar(InvalidValue):
    """A schema, regular expression or grammar is malformed, matches nothing, or costs too much."""

    code = "invalid_grammar"


class PromptTooLong(RequestError):
    """Prompt and answer do not fit in the model's context."""

    code = "context_length_exceeded"


class DeadlyPrompt(RequestError):
    """Engines died while they read this prompt: a client must not send it again, as it would after a 5xx."""

    code = "deadly_prompt"


class Unauthorized(RequestError):
    """No key, or one that is not valid here."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """A tenant's key on a route for operators."""

    status = 403
    type = "permission_error"
    code = "operator_key_needed"


class NotFound(RequestError):
    """No resource of this name."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """Another model than the one that is served."""

    code = "model_not_found"


class ResponseNotFound(NotFound):
    """No response of this id is stored for this key: there was none, or it had to make room."""

    code = "response_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed  # the value of the header Allow


class Conflict(RequestError):
    """The order contradicts the state of the server; nothing was changed."""

    status = 409
    code = "conflict"


class RequestTimeout(RequestError):
    """The client was too slow to send the request."""

    status = 408
    code = "request_timeout"


class TimeLimitReached(RequestError):
    """The answer took longer than the request's own `timeout`. OpenAI's clients send it again unless forbidden."""

    status = 408
    code = "request_timeout"


class SlowClient(RequestError):
    """The client was too slow to read the answer."""

    status = 408
    code = "slow_client"


class PayloadTooLarge(RequestError):
    """The body is larger than the limit."""

    status = 413
    code = "payload_too_large"


class UnsupportedMediaType(RequestError):
    """The body is not `application/json`, or it is compressed."""

    status = 415
    code = "unsupported_media_type"


class HeadersTooLarge(RequestError):
    """Too many headers, or headers that are too large."""

    status = 431
    code = "headers_too_large"


class TooManyRequests(RequestError):
    """The queue, or the memory for bodies, is full; come again later."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_requests"


class RateLimited(RequestError):
    """The API key has used its requests or tokens of this minute."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int, is_of_tokens: bool) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_of_tokens = is_of_tokens


class ServiceError(HallmarkError):
    pass


class InternalError(ServiceError):
    """The server failed; its log says more under the request's id."""


class NonFiniteLogits(ServiceError):
    """The model computed a number that is not finite."""

    code = "nonfinite_logits"


class NotReady(ServiceError):
    """The engine is starting, restarting, or refuses to serve."""

    status = 503
    code = "not_ready"


class EngineDied(ServiceError):
    """The engine died while it served this request; it is being restarted."""

    status = 503
    code = "engine_died"


class ShuttingDown(ServiceError):
    """The server is shutting down."""

    status = 503
    code = "shutting_down"


class DeadlineExceeded(ServiceError):
    """The answer took longer than a request may take."""

    status = 504
    code = "deadline_exceeded"


def error_of_code(code: str | None, message: str | None) -> HallmarkError:
    """The error that the engine means by a delta's `error_code`; InternalError for one that no request may see."""
    refusals = (
        InvalidValue,
        InvalidGrammar,
        PromptTooLong,
        DeadlyPrompt,
    )  # of what only the engine has, such as the model's vocabulary
    for kind in (NonFiniteLogits, EngineDied, NotReady, ShuttingDown, DeadlineExceeded, SlowClient, *refusals):
        if kind.code == code:
            return kind(message or kind.code, retry_after_s=RETRY_AFTER_S if kind.status == 503 else None)
    return InternalError(INTERNAL_MESSAGE)
