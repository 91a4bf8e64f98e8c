"""The MoE layer: router, experts, shared experts, load and auxiliary losses."""
