"""The backend for GPUs of one host: kernels read and write the peers' memory."""
