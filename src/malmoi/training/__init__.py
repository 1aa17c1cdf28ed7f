"""Training: recipes, the trainer, and its saved state."""
