"""Values of a request in messages to its client."""


def redacted(value: object) -> str:
    """A value for an error message: numbers as they are, never a text, which may be a prompt."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return repr(value)[:32].lower()
    kinds = {str: "a string of length", list: "an array of length", dict: "an object of size"}
    return f"{kinds[type(value)]} {len(value)}" if isinstance(value, str | list | dict) else type(value).__name__


def plain_name(name: str) -> str:
    """The name of a field as a client gave it: short, and of what every encoding and log can carry."""
    return name[:64].encode("ascii", "backslashreplace").decode()
