"""Expert parallelism for axolotl: ``plugins: [moe_comm.integrations.axolotl.MoeCommPlugin]``."""

from importlib.util import find_spec

from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.runtime.versions import attach_adapter

try:
    __getattr__, __dir__, __all__ = attach_adapter(__name__, __file__, "axolotl")
except MissingDependency as error:
    if find_spec("axolotl") is None:
        raise
    raise ConfigError(str(error)) from error  # axolotl logs the ImportError of a plugin and trains without it
