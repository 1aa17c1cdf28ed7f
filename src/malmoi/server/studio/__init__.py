"""The studio's views: one module each, with a typed answer; `routes.py` gives them addresses."""
