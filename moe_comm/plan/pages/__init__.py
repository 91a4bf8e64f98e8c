"""A plan as an HTML page and as a trace."""
