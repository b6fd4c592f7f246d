"""OpenAI's Responses API: /v1/responses, translated to a chat and back.

requests      what is taken
conversation  from a valid request to the chat request that says the same
answer        the answer, whole or as events
schemas       the answers and events as the document shows them
input_items   the input of a stored answer, in pages
store         answers that later requests continue, in bounded memory
"""
