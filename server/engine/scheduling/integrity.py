"""The error of what a sequence owns."""


class IntegrityError(Exception):
    """The accounting of pages or states is wrong; the engine must not go on: sequences could read each other's."""
