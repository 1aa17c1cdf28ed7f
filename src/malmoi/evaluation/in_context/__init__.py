"""In-context evaluation: prompts with zero, one or a few examples instead of training."""
