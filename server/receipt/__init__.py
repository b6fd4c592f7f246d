"""Receipts of answers on the side of the server: the key that signs them, and what is put into them."""
