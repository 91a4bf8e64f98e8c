"""Backends that move rows inside one process, over shared memory, or by collectives of torch.distributed."""
