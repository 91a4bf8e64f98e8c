"""Machines: accelerators and links, from tables or files, and what matrix products and collectives take on them."""
