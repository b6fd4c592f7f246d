"""Helpers that the tests share: fakes, emulators, small models, and programs that tests start."""
