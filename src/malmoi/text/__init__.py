"""Text from any file: documents, lines, sentences."""
