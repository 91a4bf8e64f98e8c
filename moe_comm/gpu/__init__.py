"""Launching CUDA kernels that access memory of other ranks: shared memory blocks, a heap in them, launchers, NVRTC."""
