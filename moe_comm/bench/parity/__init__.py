"""``moe-comm parity``: the same training on every mapping."""
