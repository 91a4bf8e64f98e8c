"""Local operators as Triton kernels, for CUDA tensors. Each module names its reference in plain torch.

The operators raise InputError for shapes or dtypes that they do not support, and ConfigError for CPU tensors unless
Triton interprets kernels.
"""

from moe_comm.errors import MissingDependency, pip_install

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise MissingDependency(f"these kernels need Triton ({error}); run: {pip_install('cu13')}, or cu12") from error
