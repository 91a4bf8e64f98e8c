"""What kernels that reach other ranks' memory need of a machine: blocks that ranks share, a heap over one, launches."""
