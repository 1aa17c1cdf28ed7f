"""Prompts instead of training: a task asked in words, with no, one or some examples before it."""
