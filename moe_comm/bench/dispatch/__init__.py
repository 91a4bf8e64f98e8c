"""``moe-comm bench dispatch`` and ``bench hierarchical``: dispatch and combine."""
