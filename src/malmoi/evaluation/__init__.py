"""Evaluation: tasks, metrics, fine-tuned heads and in-context prompts."""
