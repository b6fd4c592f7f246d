"""Images of prompts: how a model's processor resizes them, and the tokens that stand for them. Imports no torch."""
