"""Reproductions of tables and figures of papers, with the published numbers."""
