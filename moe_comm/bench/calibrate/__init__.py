"""``moe-comm plan --calibrate``: measures this machine, as a cluster that the planner can plan for."""
