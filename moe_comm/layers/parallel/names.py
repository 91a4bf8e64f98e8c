"""Names of parameters as they are in a checkpoint."""

from __future__ import annotations

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def state_key(*path: str) -> str:
    """The key in a state dict of what is at ``path``, without the names that wrappers put into it.

    Those are activation checkpointing and ``torch.compile``.
    """
    return ".".join(name for name in ".".join(path).split(".") if name and name not in _WRAPPERS)
