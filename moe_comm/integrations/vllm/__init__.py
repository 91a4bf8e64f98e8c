"""Expert parallelism for vLLM: the rows of its MoE layers are moved by the dispatchers of this library.

``plugin`` is an entry point of vLLM. It does nothing unless the environment has ``MOE_COMM_VLLM=1``.
"""

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
