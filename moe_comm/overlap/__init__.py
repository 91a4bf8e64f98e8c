"""Communication hidden behind the GEMMs that it feeds or drains."""
