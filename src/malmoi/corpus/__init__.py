"""Building a corpus: clean, filter, de-duplicate, decontaminate and mix documents."""
