"""Routes of models that pool their last token: OpenAI's embeddings, and scores and ranks as vLLM gives them."""
