"""Fused operators as persistent Triton kernels: producer and consumer programs, with flags in symmetric memory."""

from moe_comm.errors import MissingDependency, pip_install

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        f"the Triton operators need Triton ({error}); run: {pip_install('cu13')}, or cu12"
    ) from error
