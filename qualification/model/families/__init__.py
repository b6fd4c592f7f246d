"""The model families that can be read: one declarative file each, listed in `registry`."""
