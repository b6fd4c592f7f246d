"""Strings to token ids and back: tokenizer, incremental decoding, stop strings, chat templates."""
