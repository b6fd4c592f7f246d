"""From a model folder to weights on a device."""
