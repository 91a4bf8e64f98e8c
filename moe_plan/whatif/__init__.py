"""What-if analysis: the cost of stragglers (slow ranks or links) in a traced run."""
