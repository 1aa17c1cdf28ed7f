"""Decoding: tokens one after another, for many requests at once, under rules of their own."""
