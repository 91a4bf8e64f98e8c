"""``moe-comm plan --calibrate``: measure this machine and describe it as a cluster for the planner."""
