from moe_comm.integrations.deepep.elastic import ElasticBuffer as ElasticBuffer, EPHandle as EPHandle
from moe_comm.integrations.deepep.events import (
    Config as Config,
    EventHandle as EventHandle,
    EventOverlap as EventOverlap,
)
from moe_comm.integrations.deepep.legacy import Buffer as Buffer
from moe_comm.integrations.deepep.module import install as install, uninstall as uninstall
