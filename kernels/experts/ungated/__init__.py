"""Mixtures whose experts have no gate: down(activation(up)), by products that are gathered as elsewhere."""
