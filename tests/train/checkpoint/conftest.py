from __future__ import annotations

import logging

import torch.distributed.checkpoint  # noqa: F401  makes the logger

# torch logs every tensor of every save at level DEBUG, which hides the message of a failing test.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
