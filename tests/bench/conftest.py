from support.fixtures import decoder, script, tiny_llama, url

__all__ = ["decoder", "script", "tiny_llama", "url"]
