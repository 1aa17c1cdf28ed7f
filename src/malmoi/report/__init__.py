"""Progress on a terminal, charts and report pages."""
