"""Reads text from any file: documents, lines, sentences."""
