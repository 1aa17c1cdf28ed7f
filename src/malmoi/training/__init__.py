"""Training: recipes, the trainer, and what it saves."""
