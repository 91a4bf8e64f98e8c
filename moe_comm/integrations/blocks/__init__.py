"""Swap MoE blocks of a user's own model: recognise their experts, or take a description of them."""
