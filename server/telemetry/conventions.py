"""Every name of a span, an attribute and an event; no other file writes one.

gen_ai.*, http.*, url.* and error.* are OpenTelemetry's (the GenAI ones are still "in development", hence the revision
in the schema's address). It has no convention for a server's side of inference or for kernels, so hallmark.* is ours.
"""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.38.0"  # the revision whose GenAI names these are
SCOPE = "hallmark"

# Spans. Above them are the HTTP server's, named by method and route, and `{operation} {model}` below that one.
TOKENIZE = "hallmark.tokenize"  # parsing the body included
QUEUE = "hallmark.queue"
PREFILL = "hallmark.prefill"
DECODE = "hallmark.decode"
ATTESTATION = "hallmark.attestation"  # of its own trace: no request asked for it
REPLAY = "hallmark.replay"  # of the request's trace: its answer was computed again

# Attributes by OpenTelemetry
SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
ERROR_TYPE = "error.type"
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_TOP_P = "gen_ai.request.top_p"
GEN_AI_STREAM = "gen_ai.request.stream"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# Attributes of ours
REQUEST_ID = "hallmark.request_id"
BUCKET = "hallmark.bucket"
CACHED_TOKENS = "hallmark.cached_tokens"
NUM_CHUNKS = "hallmark.num_chunks"
SEQUENCE = "hallmark.sequence"  # which prompt of the request
IS_COMPLETE = "hallmark.is_complete"  # false: the request ended inside of this span, or of one that would follow it
ATTENTION_PATH = "hallmark.attention.path"
ATTENTION_STATUS = "hallmark.attention.status"
ATTENTION_FALLBACK = "hallmark.attention.fallback"
ATTENTION_REASONS = "hallmark.attention.reasons"
COMPUTED_IMAGES = "hallmark.images.computed"  # of the prompt's, those that no earlier prompt had brought
TOWER_PATH = "hallmark.tower.path"  # of the attention that computed the prompt's images
TOWER_SECONDS = "hallmark.tower.seconds"  # that these took, with images that were computed beside them
MATRIX_DIGEST = "hallmark.attention.matrix_digest"
RECEIPT_DIGEST = "hallmark.receipt.digest"  # SHA-256 of the receipt's canonical content

# Events, and their attributes
FIRST_TOKEN = "first_token"
ATTENTION_SELECTED = "attention.selected"
ATTENTION_FELL_BACK = "attention.fallback"
CLIENT_DISCONNECT = "client.disconnect"
ATTESTED = "attention.attested"  # of one profiled batch
PHASE = "phase"
PATH = "path"
STATUS = "status"
REASONS = "reasons"
STAGE = "stage"
RESULT = "result"
TRIGGER = "trigger"
DETAIL = "detail"
KERNELS = "kernels"
EXPLAINED = "explained_ratio"  # of the forward pass's time
IS_REPLAY = "is_replay"
ROUTE = "route"  # by which an answer was served that was computed again
TOKENS = "tokens"  # of it, that were compared
CAUSE = "cause"
PLACE = "place"  # of its first token that differs
