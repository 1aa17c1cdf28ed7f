"""Accuracy by the number of examples in context (GPT-3 figure 1.2)."""
