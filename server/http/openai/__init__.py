"""OpenAI's routes: completions, chats, and the tokens of a text as vLLM gives them."""
