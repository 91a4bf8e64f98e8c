"""The interface of DeepEP over the dispatchers of moe_comm, for programs that call ``deep_ep``.

``install`` puts a module ``deep_ep`` into ``sys.modules``. Nothing is installed under that name on disk.
"""

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
