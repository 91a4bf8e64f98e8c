"""Arithmetic on the slots and rows of one rank: order, sums, capacity and masks."""
