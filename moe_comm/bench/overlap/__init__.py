"""``moe-comm bench overlap``: communication time that overlapped operators and layers hide."""
