"""``moe-comm bench placement``: an MoE layer with fixed and with moving experts, for synthetic uneven routing."""
