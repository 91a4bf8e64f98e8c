"""``moe-comm bench overlap``: what the overlapped operators and layers hide."""
