"""What a model is worth: tasks, metrics, evaluation with a head or in context."""
