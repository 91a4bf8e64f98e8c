"""Choose, build and share dispatchers, and report the choice in ``moe-comm doctor``."""
