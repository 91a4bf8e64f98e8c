"""Write a planned step as an HTML page or a Perfetto trace, and what-if analysis as an HTML page."""
