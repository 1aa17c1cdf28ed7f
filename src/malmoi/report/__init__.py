"""What people look at: progress on a terminal, charts, pages."""
