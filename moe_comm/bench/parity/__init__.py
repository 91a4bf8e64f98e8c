"""``moe-comm parity``: compare training on every mapping with one process."""
