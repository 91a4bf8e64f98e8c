"""``moe-comm bench train``: training steps."""
