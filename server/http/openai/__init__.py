"""OpenAI's routes: completions, chats, models, and tokens of a text as vLLM gives them."""
