"""The HTTP API: the routes, what they take and what they answer.

chat/        a conversation as a prompt, whatever protocol its client speaks
openai/      /v1/completions, /v1/chat/completions, /tokenize, /detokenize
anthropic/   /v1/messages, /v1/messages/count_tokens
responses/   /v1/responses, and the store of answers that requests continue
generation/  from a request that generates to pieces of its answer, whatever protocol its client speaks
operations/  /livez, /readyz, /health, /ping, /load, /metrics, /version, /attention and the orders below it
page/        /, for a browser
common/      from bytes to a valid pydantic model, or to an error that names the field; /openapi.json
services     the objects that handlers need
models       /v1/models, for clients of both
app          the application made of them, which starts and closes the engine

Limits on bytes, headers, keys and time are middleware in server/edge.
"""
