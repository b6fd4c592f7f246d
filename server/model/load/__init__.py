"""Loading of a model folder into weights on a device."""
