"""``moe-comm tune``: measure the fastest number of chunks or kernel."""
