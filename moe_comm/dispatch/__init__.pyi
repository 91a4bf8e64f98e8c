from moe_comm.dispatch.dispatcher import Dispatcher as Dispatcher
from moe_comm.dispatch.selection.choice import Traffic as Traffic
from moe_comm.dispatch.selection.factory import (
    BACKENDS as BACKENDS,
    explain_choice as explain_choice,
    make_dispatcher as make_dispatcher,
)
from moe_comm.dispatch.slots.capacity import Capacity as Capacity, apply_capacity as apply_capacity
from moe_comm.dispatch.types import (
    DROPPED as DROPPED,
    INVALID_LOGITS as INVALID_LOGITS,
    Dispatched as Dispatched,
    DispatchHandle as DispatchHandle,
    DispatchOptions as DispatchOptions,
    PeerToPeerOptions as PeerToPeerOptions,
)
from moe_comm.dispatch.wire_dtype import WireDtype as WireDtype, WireDtypes as WireDtypes
from moe_comm.kernels.fp8 import ScaledRows as ScaledRows
from moe_comm.runtime.memory import Array as Array
