"""Attestation, quarantine and shadow checks in the engine process."""
