"""The HTTP API: the routes, what they take and what they answer.

openai/      /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize
operations/  /livez, /readyz, /health, /metrics, /attention, /attention/attest, /attention/quarantine, /version
common/      from bytes to a valid pydantic model, or to an error that names the field; /openapi.json and /docs
app          the application made of them, which starts and closes the engine

Limits on bytes, headers, keys and time are middleware in server/edge.
"""
