"""Decoding: token by token, batched over many requests, each with its own settings."""
