"""Compare predictions of ``moe_comm.plan`` with published measurements."""
