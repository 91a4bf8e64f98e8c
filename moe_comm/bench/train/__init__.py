"""``moe-comm bench train``: whole training steps."""
