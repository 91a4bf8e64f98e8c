"""What stragglers cost a run that was traced."""
