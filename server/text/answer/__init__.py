"""A model's answer as it grows: which of its text is reasoning, content, or calls of tools.

`syntax` chooses the formats of a model, and makes an `AnswerParser` (`parser`) for each answer. A tool format is one
file: `hermes`, `qwen3_coder`, `llama3_json`, `mistral`, `gemma`, `harmony` (which has reasoning in it, too).
"""
