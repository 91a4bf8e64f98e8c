from __future__ import annotations

import logging

import torch.distributed.checkpoint  # noqa: F401  makes the logger

# torch logs every tensor of every save at level DEBUG, which buries what a failing test says.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
