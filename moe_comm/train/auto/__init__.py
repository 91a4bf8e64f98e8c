"""``parallel = "auto"``: measure the ranks, and let the planner choose the parallel settings of a run."""
