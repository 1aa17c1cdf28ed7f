"""Faster forms of parts of a model, exact against the plain ones: int8, fused steps, graphs."""
