"""Answers of models with calls in every format, written as chat templates write them."""
