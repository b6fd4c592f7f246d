"""Receipts of answers: what they hold, their signatures, and how an answer is computed again from one."""
