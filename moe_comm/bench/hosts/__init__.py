"""Hosts in network namespaces on one machine, and ranks on them.

from moe_comm.bench.hosts import Hosts, measure_links, run_on_hosts
"""

from __future__ import annotations

from moe_comm.bench.hosts.namespaces import Hosts, unavailable_reason
from moe_comm.bench.hosts.ranks import measure_links, run_on_hosts

__all__ = ["Hosts", "measure_links", "run_on_hosts", "unavailable_reason"]
