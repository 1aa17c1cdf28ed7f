"""The studio's views, one module each with a typed response; `routes.py` has the endpoints."""
