"""Compare predictions of ``moe_plan`` with published measurements."""
