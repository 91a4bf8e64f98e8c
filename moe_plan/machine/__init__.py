"""Machines: accelerators and links from tables or files, and cost models of matrix products and collectives on them."""
