"""``moe-comm bench serve``: latency and throughput of requests, with experts on ranks of their own and otherwise."""
