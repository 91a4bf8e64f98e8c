"""Hosts made of network namespaces on one machine, and ranks on them.

from moe_comm.bench.hosts import Hosts, measure_links, run_on_hosts
"""

from __future__ import annotations

from moe_comm.bench.hosts.namespaces import Hosts, why_not
from moe_comm.bench.hosts.ranks import measure_links, run_on_hosts

__all__ = ["Hosts", "measure_links", "run_on_hosts", "why_not"]
