"""Helpers without a subject of their own: quantiles, tables, flags, folders, progress."""
