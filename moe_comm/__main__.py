"""``python -m moe_comm``: the same as ``moe-comm``."""

from moe_comm.cli import main

if __name__ == "__main__":
    main()
