"""Decoding: tokens one at a time, for many requests at once, each with its own settings."""
