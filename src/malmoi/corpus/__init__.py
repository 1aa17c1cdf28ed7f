"""Corpus building: clean, filter, de-duplicate, decontaminate and mix documents."""
