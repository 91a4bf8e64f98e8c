"""Plan a parallel mapping before a run (cost model, simulation, search), and compute what stragglers cost in a run."""
