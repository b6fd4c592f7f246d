"""Benches of attention, of servers under load and of the engine's steps (`hallmark bench`); not in the wheel."""
