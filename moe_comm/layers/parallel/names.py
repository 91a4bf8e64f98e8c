"""Parameter names in state dicts."""

from __future__ import annotations

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def state_key(*path: str) -> str:
    """Return the state-dict key of ``path``, without the names of checkpointing and ``torch.compile`` wrappers."""
    return ".".join(name for name in ".".join(path).split(".") if name and name not in _WRAPPERS)
