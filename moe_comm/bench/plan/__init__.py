"""``moe-comm bench plan``: predicted steps against measured ones."""
