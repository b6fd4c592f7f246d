"""Anthropic's messages: /v1/messages and /v1/messages/count_tokens, translated to a chat and back.

requests      what is taken
conversation  from a valid request to the chat request that says the same
message       the answer, whole or as events
schemas       the answers and events as the document shows them
errors        errors in Anthropic's envelope
"""
