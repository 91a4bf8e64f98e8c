"""Self-attention, multi-head latent attention, and context parallelism."""
