"""``moe-comm tune``: how many chunks, or which kernel, is fastest here."""
