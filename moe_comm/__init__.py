"""Mixture-of-Experts layers whose experts live on different ranks."""
