"""Checkpoints: asynchronous, atomic, with checksums and without pickle, and loadable on any other mapping."""

from moe_comm.train.checkpoint.entries import Entry, restore_rng, rng_state
from moe_comm.train.checkpoint.folder import latest
from moe_comm.train.checkpoint.reader import CheckpointReader, Loaded, load, read_tensor
from moe_comm.train.checkpoint.saving import Checkpointer, SaveReport

__all__ = [
    "CheckpointReader",
    "Checkpointer",
    "Entry",
    "Loaded",
    "SaveReport",
    "latest",
    "load",
    "read_tensor",
    "restore_rng",
    "rng_state",
]
