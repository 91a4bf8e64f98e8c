"""Models: their matrices, and from these parameters, FLOPs and memory. Nothing else in the package counts them."""
