"""Mixtures of experts: which experts a token visits, and the products of those experts."""
