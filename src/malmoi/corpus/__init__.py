"""Documents in, documents out: reading text of any kind and splitting it into sentences."""
