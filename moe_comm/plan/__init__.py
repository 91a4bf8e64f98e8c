"""Choosing a mapping on paper: cost model, simulator and search; and what stragglers cost in runs that were traced."""
