from support.fixtures import script, url

__all__ = ["script", "url"]
