"""What the studio shows: one module a sight, each with a typed answer. `serve/views.py` gives them addresses."""
