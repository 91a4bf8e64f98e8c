"""``moe-comm bench layer``: forward and backward of an MoE layer."""
