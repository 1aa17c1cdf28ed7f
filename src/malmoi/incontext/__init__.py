"""Prompts instead of training: a task asked in words, with no, one or some examples before it."""

from malmoi.incontext.evaluate import Asking, Result, evaluate

__all__ = ["Asking", "Result", "evaluate"]
