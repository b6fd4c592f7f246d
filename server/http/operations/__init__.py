"""Routes for probes and operators: health, metrics, the attention plan, attestation, quarantine."""
