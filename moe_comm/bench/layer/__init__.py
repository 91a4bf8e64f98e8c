"""``moe-comm bench layer``: a whole MoE layer, forward and backward."""
