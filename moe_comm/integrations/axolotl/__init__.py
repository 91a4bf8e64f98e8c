"""Expert parallelism for axolotl: ``plugins: [moe_comm.integrations.axolotl.MoeCommPlugin]``."""

from importlib.util import find_spec

from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.lazy import attach_stub
from moe_comm.runtime.versions import require

try:
    require("axolotl", "moe_comm.integrations.axolotl")
except MissingDependency as error:
    if find_spec("axolotl") is None:
        raise
    raise ConfigError(str(error)) from error  # axolotl logs the ImportError of a plugin and trains without it

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
