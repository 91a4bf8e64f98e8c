"""Count how often ``moe-comm diagnose`` names the right rank or link, in training runs with injected faults."""
