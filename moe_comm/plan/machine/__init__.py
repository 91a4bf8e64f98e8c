"""Machines: accelerators and links, from tables or files, and what matrix products and collectives take on them."""

"""Machines: accelerators and links from tables or files, and cost models of matrix products and collectives on them."""
