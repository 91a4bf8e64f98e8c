"""Imports of moe_comm and transformers in different orders. This module is for ranks that have imported neither."""

from __future__ import annotations

import sys

ORDERS = (
    "import moe_comm; import transformers",
    "import transformers.integrations.moe; import moe_comm",
    "import moe_comm; import transformers.distributed.expert_parallel",
)


def registered(rank: int, world: int, arg: None) -> list[bool]:
    """Import in the order of this rank. Return whether each registry of transformers has both names."""
    assert not {"moe_comm", "transformers"} & sys.modules.keys()
    exec(ORDERS[rank])
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.integrations.moe import ExpertsInterface

    names = ("moe_comm", "moe_comm_fp8")
    return [bool(registry[name]) for registry in (ExpertsInterface(), EPImplementationInterface()) for name in names]
