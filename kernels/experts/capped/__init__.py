"""Mixtures whose experts bound what they multiply (`CappedSilu`): products as elsewhere, the activation apart."""
