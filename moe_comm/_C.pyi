"""Types of the native core (csrc/bindings.cpp). Addresses are plain integers; the caller keeps their memory alive.

dtype codes: 0 float32, 1 bfloat16, 2 float16; in grouped GEMMs also 3 float64. Strides are in elements for swiglu and
rotate, in bytes elsewhere. ``compared``: the header's compared words.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import Tensor

class HandshakeFailed(Exception):
    """The headers of the ranks differ, or one reports a fault. ``headers``: one per rank, packed by ``pack_header``."""

    headers: list[bytes]

class Heap:
    """A growing segment of shared memory; private memory if ``name`` is empty."""

    def __init__(
        self, name: str, control_bytes: int = 0, initial_bytes: int = 0, reserve_bytes: int = 1 << 38
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    def unlink(self) -> None: ...
    def owns(self, address: int, num_bytes: int, /) -> bool: ...
    def tensor(self, rows: int, columns: int, dtype: int) -> Any: ...

class Communicator:
    """Handshake, flags and waits with deadlines between the ranks that share heaps."""

    def __init__(
        self,
        heap: Heap,
        rank: int,
        world: int,
        timeout_s: float,
        spin_us: float,
        first_progress: int = 0,
        watch_pids: bool = True,
    ) -> None: ...
    @staticmethod
    def control_bytes() -> int: ...
    def attach(self, names: Sequence[str], /) -> None: ...
    def set_step(self, step: int, /) -> None: ...
    def set_timeout(self, seconds: float, /) -> None: ...
    def check_peers(self) -> None: ...
    def give_up(self) -> None: ...
    def pids(self) -> list[int]: ...

class Layout:
    """The positions of the rows of one dispatch."""

    @property
    def rows_per_expert(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> int: ...
    @property
    def counts(self) -> bytes:
        """[W, E] int64: slots that each rank sends to each expert."""

    @property
    def dropped(self) -> int: ...
    @property
    def own(self) -> int:
        """Slots of this rank that are routed to its own experts."""

class SharedTokens:
    """Tokens of all ranks that this rank reads in place. They are valid while this object exists on any rank."""

class Transfer:
    """Dispatch, combine and their backward passes. Without a communicator, this process holds all experts."""

    def __init__(
        self, communicator: Communicator | None, heap: Heap, expert_offsets: Sequence[int], threads: int
    ) -> None: ...
    def send(
        self,
        compared: Sequence[int],
        label: str,
        x: Tensor,
        ids: Tensor,
        words: tuple[int, int, int, int],
        /,
    ) -> tuple[Any, Layout, tuple[int, ...], int, int, int, Any]:
        """Dispatch tokens [T, D] with ids [T, K], in any strides.

        words: address, width and both strides in words of [T, K, width] 32-bit words that are sent with the rows; width
        0 without.

        Returns:
            The rows, the layout, its rows per expert, number of rows, of dropped slots and of own slots on this rank,
            and the words; None without.
        """

    def share(
        self,
        compared: Sequence[int],
        label: str,
        x: Tensor,
        ids: Tensor,
        /,
    ) -> tuple[
        SharedTokens, Layout, tuple[int, ...], int, int, int, tuple[list[tuple[list[int], int]], list[int], int]
    ]:
        """Dispatch without rows: experts read the tokens of all ranks in place. Arguments are those of ``send``.

        Returns:
            The tokens, the layout, its rows per expert, number of rows, of dropped slots and of own slots on this rank,
            and where the rows are: for each part, address of the rows of each rank and their stride; the number of
            tokens of each rank; and the address of the packed places (rank, token) of the rows, valid with the layout.
        """

    def share_again(
        self,
        compared: Sequence[int],
        label: str,
        layout: Layout,
        parts: Sequence[tuple[int, int]],
        words: int,
        word_of_row: int,
        /,
    ) -> tuple[SharedTokens, tuple[list[tuple[list[int], int]], list[int], int]]:
        """Share rows of the tokens, with the layout of ``share``. Return the tokens, and where the rows are.

        parts: address and stride of the tokens, or of their gradients. words: address of a 32-bit word for each slot,
        [T, K]; 0 without. word_of_row: address of the result [R], the word of each row of this rank's experts.
        """

    def copy_shared(self, layout: Layout, tokens: SharedTokens, part: int, row: int, count: int, y: int, /) -> None:
        """Write rows of this rank's experts, [count, D] from ``row`` on, to the address ``y``."""

    def sum(
        self,
        compared: Sequence[int],
        label: str,
        layout: Layout,
        rows: Tensor | None,
        weights: Tensor | None,
        results: Heap | None,
        words: tuple[int, int, int],
        /,
    ) -> Any:
        """Combine. Return the sums [T, D] in a block of ``results``; None without it, to move words only.

        words: address [R, width], width, and address of the result [T, K, width].
        """

    def spread(
        self,
        compared: Sequence[int],
        label: str,
        layout: Layout,
        grad: int,
        grad_stride: int,
        rows: int,
        rows_stride: int,
        weights: int,
        weight_grads: bool,
        grad_weights: int,
        words: tuple[int, int, int, int],
        /,
    ) -> tuple[Any, Any]:
        """Run the backward of combine. Return the gradient of the rows, and words as ``send``."""

    def start_send(
        self,
        compared: Sequence[int],
        label: str,
        fault: int,
        text: str,
        x: int,
        x_stride: int,
        ids: int,
        tokens: int,
        top_k: int,
        hidden: int,
        dtype: int,
        /,
    ) -> tuple[Any, Layout, PendingReceive]: ...
    def start_sum(
        self,
        compared: Sequence[int],
        label: str,
        fault: int,
        text: str,
        layout: Layout,
        rows: int,
        rows_stride: int,
        computed: bool,
        /,
    ) -> PendingSum: ...
    def start_spread(
        self,
        compared: Sequence[int],
        label: str,
        layout: Layout,
        grad: int,
        grad_stride: int,
        rows: int,
        rows_stride: int,
        weights: int,
        weight_grads: bool,
        grad_weights: int,
        /,
    ) -> tuple[Any, PendingReceive]: ...

class PendingReceive:
    """A dispatch or backward of combine whose rows are in flight to this rank's block. Call it from one thread."""

    def ready(self, peer: int, /) -> bool: ...
    def next(self, peers: Sequence[int], /) -> int: ...
    def finish(self) -> None: ...
    def finished(self) -> bool: ...
    def abandon(self) -> None: ...

class PendingSum:
    """A combine or backward of dispatch. Peers read the rows once their flag is raised. Call it from one thread."""

    def raise_flag(self, peer: int, /) -> None: ...
    def ready(self) -> bool: ...
    def sum(self, weights: int, y: int, /) -> None: ...
    def finish(self) -> None: ...
    def finished(self) -> bool: ...
    def abandon(self) -> None: ...

class Exchange:
    """Collectives with equal parts over one communicator. ``x``: this rank's buffer, in its own heap. ``first`` is in
    bytes for ``copy`` and in elements for ``sum``; ``part`` is in bytes, ``count`` in elements."""

    def __init__(self, communicator: Communicator, threads: int) -> None: ...
    def copy(
        self,
        compared: Sequence[int],
        label: str,
        fault: int,
        text: str,
        x: int,
        bytes: int,
        first: int,
        part: int,
        y: int,
        /,
    ) -> None: ...
    def sum(
        self,
        compared: Sequence[int],
        label: str,
        fault: int,
        text: str,
        x: int,
        bytes: int,
        first: int,
        count: int,
        dtype: int,
        y: int,
        /,
    ) -> None: ...
    def values(self, compared: Sequence[int], label: str, own: tuple[int, int], /) -> list[list[int]]: ...
    def all_sum(
        self, compared: Sequence[int], label: str, fault: int, text: str, x: int, bytes: int, dtype: int, /
    ) -> None: ...

class Rendezvous:
    """A collective that overlaps with computation. ``x``: this rank's buffer, in its own heap. It begins with
    ``flag_bytes()`` for each rank. ``first`` is in bytes. Call it from one thread."""

    def __init__(
        self,
        communicator: Communicator,
        threads: int,
        compared: Sequence[int],
        label: str,
        fault: int,
        text: str,
        x: int,
        bytes: int,
        /,
    ) -> None: ...
    @staticmethod
    def flag_bytes() -> int: ...
    def next(self, peers: Sequence[int], /) -> int: ...
    def rows(self, peer: int, first: int, rows: int, columns: int, dtype: int, /) -> Any: ...
    def raise_flag(self, peer: int, /) -> None: ...
    def add(self, first: int, count: int, dtype: int, y: int, /) -> None: ...
    def publish_done(self) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...

def swiglu_forward(h: int, h_stride: int, act: int, rows: int, width: int, dtype: int, threads: int) -> None: ...
def swiglu_backward(
    h: int, h_stride: int, grad_act: int, grad_h: int, act: int, rows: int, width: int, dtype: int, threads: int
) -> None: ...
def rms_norm_forward(
    x: int, weight: int, y: int, scale: int, rows: int, width: int, eps: float, dtype: int, threads: int
) -> None: ...
def rms_norm_backward(
    x: int,
    weight: int,
    scale: int,
    grad_y: int,
    grad_x: int,
    grad_parts: int,
    rows: int,
    rows_of_part: int,
    width: int,
    dtype: int,
    threads: int,
) -> None: ...
def rotate(
    x: int,
    strides: Sequence[int],
    y: int,
    cos: int,
    sin: int,
    angles: int,
    sign: float,
    shape: Sequence[int],
    threads: int,
) -> None: ...
def weighted_sum(
    rows: int, place: int, weights: int, y: int, shape: Sequence[int], dtype: int, threads: int
) -> None: ...
def scale_rows(
    rows: int, weights: int, partner: int, dots: int, shape: Sequence[int], dtype: int, threads: int
) -> None: ...
def rank_layout(
    ids: int, shape: tuple[int, int], id_bytes: int, owner: int, world: int, outputs: tuple[int, int, int, int]
) -> None: ...
def local_slots(
    words: int, shape: tuple[int, int, int], own: tuple[int, int], id_bytes: int, outputs: tuple[int, int, int]
) -> None: ...
def ids_of_mask(mask: int, shape: tuple[int, int, int], ids: int) -> int: ...
def plan_rows(
    loads: Sequence[int],
    home: Sequence[int],
    world: int,
    limits: tuple[int, int, int, int, int],
    residents: Sequence[tuple[int, int]],
) -> tuple[list[list[int]], int]: ...
def bare_gather(src: int, index: int, dst: int, count: int, row_bytes: int, threads: int, /) -> None: ...
def bare_weighted_sum(
    dst: int, src: int, weights: int, tokens: int, top_k: int, hidden: int, dtype: int, threads: int, /
) -> None: ...
def pack_header(compared: Sequence[int], label: str, fault: int, text: str, /) -> bytes: ...
def sweep_stale(prefix: str, /) -> int: ...

interface: str
"""SHA-256 of this file when the module was built."""

def isa() -> str: ...
def isas() -> list[str]: ...
def is_plain(tensors: list[Any], /) -> bool:
    """Return whether all are tensors, not of a subclass, of numbers that are at their addresses. False for some others,
    too."""

def fence() -> None: ...
def set_isa(name: str, /) -> bool: ...
def p2p_words() -> dict[str, list[str]]: ...
def p2p_constants() -> dict[str, int]: ...
def p2p_control(world: int, experts: int, local_experts: int) -> dict[str, int]: ...
def p2p_row_bytes(hidden: int, dtype: int, format: int) -> tuple[int, int]: ...
def p2p_shared_bytes(kernel: str, threads: int, args: bytes) -> int: ...
def p2p_lend_words(world: int, experts: int, residents: int, copies: int) -> tuple[int, int]: ...
def p2p_threads() -> dict[str, int]: ...
def p2p_tensor(
    at: int, rows: int, columns: int, code: int, bits: int, device_type: int, device: int, owner: object
) -> Any: ...
def gpu_gemm_code() -> bytes: ...
def gpu_gemm_kernels() -> list[str]: ...

class GpuGemm:
    """Launches grouped GEMMs on a GPU; see csrc/cuda/gemm/launch.h. A matrix: address, rows, columns, two strides."""

    def __init__(self, calls: Mapping[str, int], context: int, functions: Mapping[str, int], blocks: int) -> None: ...
    def rows(
        self,
        rows: Sequence[int],
        w: Sequence[int],
        transposed: bool,
        counts_at: int,
        experts: int,
        out: Sequence[int],
        act: Sequence[int],
        slots: tuple[int, int, int, int],
        stream: int,
        /,
    ) -> None: ...
    def listed(
        self,
        matrices: Sequence[Sequence[int]],
        transposed: bool,
        experts: int,
        list: Sequence[int],
        published: bool,
        blocks: int,
        stream: int,
        /,
    ) -> None: ...
    def swiglu_gradient(
        self,
        grad: Sequence[int],
        w: Sequence[int],
        counts_at: int,
        experts: int,
        matrices: Sequence[Sequence[int]],
        weights: Sequence[int],
        stream: int,
        /,
    ) -> None: ...
    def weights(
        self,
        a: Sequence[int],
        b: Sequence[int],
        counts_at: int,
        experts: int,
        out: Sequence[int],
        add: bool,
        stream: int,
        /,
    ) -> None: ...
    def rows_fp8(
        self,
        matrices: Sequence[Sequence[int]],
        scales: tuple[int, int, int],
        w_scales: tuple[int, int, int],
        counts: tuple[int, int, int, int],
        stream: int,
        /,
    ) -> None: ...

class GpuRecord:
    """Launches that ``run`` repeats; see csrc/cuda/record.h. buffers: number of a base, and offset in bytes.

    ``rows``, ``swiglu_gradient`` and ``weights`` take the arguments of ``GpuGemm``, with numbers of buffers, -1 for
    none, in place of addresses.
    """

    def __init__(self, calls: Mapping[str, int], context: int, buffers: Sequence[tuple[int, int]]) -> None: ...
    def kernel(
        self,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[bytes | int | Sequence[int]],
        /,
    ) -> None: ...
    def rows(
        self,
        launcher: GpuGemm,
        rows: Sequence[int],
        w: Sequence[int],
        transposed: bool,
        counts_at: int,
        experts: int,
        out: Sequence[int],
        act: Sequence[int],
        slots: tuple[int, int, int, int],
        /,
    ) -> None: ...
    def swiglu_gradient(
        self,
        launcher: GpuGemm,
        grad: Sequence[int],
        w: Sequence[int],
        counts_at: int,
        experts: int,
        matrices: Sequence[Sequence[int]],
        weights: Sequence[int],
        /,
    ) -> None: ...
    def weights(
        self,
        launcher: GpuGemm,
        a: Sequence[int],
        b: Sequence[int],
        counts_at: int,
        experts: int,
        out: Sequence[int],
        add: bool,
        /,
    ) -> None: ...
    def __len__(self) -> int: ...
    def run(self, bases: Sequence[int], stream: int, /) -> None: ...

class P2pStarter:
    """A kernel launcher: on this thread, through the CUDA runtime, through the driver, or a Python function."""

    @staticmethod
    def host() -> P2pStarter: ...
    @staticmethod
    def cuda(device: int) -> P2pStarter: ...
    @staticmethod
    def driver(calls: Mapping[str, int], context: int, functions: Mapping[str, int]) -> P2pStarter: ...
    @staticmethod
    def python(call: Callable[[str, int, int, int, int, bytes], None], /) -> P2pStarter: ...
    def start(self, kernel: str, blocks: int, threads: int, shared_bytes: int, stream: int, args: bytes) -> None: ...

class P2pPlan:
    """Launches the kernels of one rank's operations; see csrc/cuda/plan.h.

    Call ``begin`` before each operation, and ``use`` when the scratch memory changes. offer: five words. scratch: six
    addresses.
    """

    @property
    def turn(self) -> int: ...
    @turn.setter
    def turn(self, value: int) -> None: ...
    def __init__(
        self,
        starter: P2pStarter,
        group: Sequence[int],
        offsets: Sequence[int],
        headers_at: int,
        all_headers_at: int,
        host_counts_at: int,
        left_at: int,
        /,
    ) -> None: ...
    def begin(self, stream: int, timeout_ns: int, captured: bool, /) -> None: ...
    def use(self, scratch: Sequence[int], /) -> None: ...
    def dispatch(
        self,
        header: bytes,
        slot: int,
        offer: Sequence[int],
        tokens: int,
        top_k: int,
        ids_at: int,
        place_at: int,
        chunk: int,
        x_at: int,
        stride: int,
        hidden: int,
        dtype: int,
        how: Sequence[int],
        links: Sequence[int],
        /,
    ) -> None: ...
    def arrive(self, first_source: int, sources: int, /) -> None: ...
    def received(self, source: int, /) -> bool: ...
    def meet(self, header: bytes, slot: int, offer: Sequence[int], /) -> None: ...
    def sum(
        self,
        header: bytes,
        slot: int,
        offer: Sequence[int],
        blocks: int,
        tokens: int,
        top_k: int,
        hidden: int,
        dtype: int,
        place_at: int,
        weights_at: int,
        y_at: int,
        words_at: int,
        /,
    ) -> None: ...
    def sum_slices(
        self,
        blocks: int,
        tokens: int,
        top_k: int,
        hidden: int,
        dtype: int,
        place_at: int,
        weights_at: int,
        y_at: int,
        /,
    ) -> None: ...
    def done(self) -> None: ...
    def lend(
        self,
        header: bytes,
        slot: int,
        tokens: int,
        top_k: int,
        ids_at: int,
        place_at: int,
        chunk: int,
        lending: Sequence[int],
        settings: Sequence[int],
        /,
    ) -> None: ...
    def pull(
        self, lending: Sequence[int], sizes: Sequence[int], stacks_at: int, element: int, blocks: int, /
    ) -> None: ...
    def collect(
        self,
        header: bytes,
        slot: int,
        offer: Sequence[int],
        lending: Sequence[int],
        sizes: Sequence[int],
        out_at: Sequence[int],
        dtype: int,
        blocks: int,
        /,
    ) -> None: ...
    def sum_reduced(
        self,
        header: bytes,
        slot: int,
        offer: Sequence[int],
        blocks: int,
        tokens: int,
        top_k: int,
        hidden: int,
        dtype: int,
        place_at: int,
        weights_at: int,
        y_at: int,
        own: Sequence[int],
        /,
    ) -> None: ...
    def spread(
        self,
        header: bytes,
        slot: int,
        offer: Sequence[int],
        blocks: int,
        tokens: int,
        top_k: int,
        hidden: int,
        dtype: int,
        place_at: int,
        weights_at: int,
        grad_at: int,
        stride: int,
        dots_at: int,
        words_at: int,
        order_at: int,
        done: bool,
        /,
    ) -> None: ...
    def send_few(
        self,
        tokens: int,
        top_k: int,
        ids_at: int,
        hidden: int,
        dtype: int,
        x_at: int,
        stride: int,
        offers_at: int,
        place_at: int,
        max_tokens: int,
        parts: int,
        format: int,
        power_of_two: int,
        /,
    ) -> None: ...
    def receive_few(self, parts: int, counts_at: int, /) -> None: ...
    def sum_few(
        self,
        blocks: int,
        tokens: int,
        top_k: int,
        hidden: int,
        dtype: int,
        place_at: int,
        weights_at: int,
        y_at: int,
        offers_at: int,
        /,
    ) -> None: ...
    def record_dispatch(
        self,
        record: GpuRecord,
        header: bytes,
        numbers: Sequence[int],
        of: Sequence[int],
        at: Sequence[int],
        sizes: Sequence[int],
        how: Sequence[int],
        /,
    ) -> None: ...
    def record_sum(
        self,
        record: GpuRecord,
        header: bytes,
        numbers: Sequence[int],
        of: Sequence[int],
        at: Sequence[int],
        blocks: int,
        /,
    ) -> None: ...
    def record_lend(
        self,
        record: GpuRecord,
        header: bytes,
        numbers: Sequence[int],
        of: Sequence[int],
        at: Sequence[int],
        lending: Sequence[int],
        settings: Sequence[int],
        /,
    ) -> None: ...
    def record_pull(
        self,
        record: GpuRecord,
        plan_words: int,
        lending: Sequence[int],
        sizes: Sequence[int],
        how: Sequence[int],
        /,
    ) -> None: ...
    def record_collect(
        self,
        record: GpuRecord,
        header: bytes,
        numbers: Sequence[int],
        at: Sequence[int],
        lending: Sequence[int],
        sizes: Sequence[int],
        how: Sequence[int],
        /,
    ) -> None: ...
    def record_spread(
        self,
        record: GpuRecord,
        header: bytes,
        numbers: Sequence[int],
        of: Sequence[int],
        at: Sequence[int],
        sizes: Sequence[int],
        /,
    ) -> None: ...
    def completed_turn(self) -> int: ...
    def failed(self) -> bool: ...
    def wait(self, until: int, limit_ns: int, /) -> bool: ...
    def counted(self, header_word: int, /) -> tuple[list[int], list[int], list[int], int]: ...

def cuda_sources() -> dict[str, str]: ...
def cuda_archs() -> str: ...
def cuda_probe() -> str | None: ...

class Open:
    """A span, as a context manager. ``put`` sets fields that are not available when the span begins."""

    name: str
    layer: str
    kind: int
    group: int
    peer: int
    nbytes: int
    index: int
    begin_ns: int

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...
    def put_rows(self, rows: Sequence[int], nbytes: int, /) -> None:
        """Record the rows received for each of this rank's experts, and the bytes that this rank sent."""

    def put(
        self, *, name: str | None = None, layer: str | None = None, peer: int | None = None, nbytes: int | None = None
    ) -> None:
        """Update fields of the span. Its micro-batch becomes the current one."""

    def put_device(self, begin_ns: int, end_ns: int, /) -> None:
        """Record when the work began and ended on a GPU, in the host's clock. May be called after the span ended."""

class SpanRecorder:
    """Writes spans into a region; ``moe_comm.runtime.events.EventRecorder`` prepares it."""

    step: int
    micro: int
    enabled: bool
    device: Any
    _names: dict[str, int]

    def span(
        self, kind: int, name: str, /, *, layer: str = "", group: int = 0, peer: int = -1, nbytes: int = 0
    ) -> Open:
        """Return a span as a context manager. With ``group`` it is counted as the next call of the group."""

    def _bind(self, buffer: memoryview, records: int, main_thread: int, /) -> None: ...
    def _begin_step(self, step: int, /) -> None: ...
    def _reset_calls(self) -> None: ...
    def _take(self) -> tuple[dict[int, int], dict[int, int], dict[int, int], dict[int, int], int]: ...

GemmRows = tuple[Sequence[int], Sequence[int], int, int, int, int, int]
"""Addresses and numbers of rows of the sources, bytes between rows, addresses of the row list [R] (packed places) and
of the scales [R] or 0, R, and the width of the rows."""

def grouped_gemm(
    sizes: Sequence[int],
    dtype: int,
    threads: int,
    x: GemmRows,
    w: Sequence[int],
    columns: int,
    bias: Sequence[int],
    out: Sequence[int],
    accumulate: bool = False,
) -> None:
    """out[r] = x[r] @ w[e].T + bias[e], or that added to out. w [E, N, K], bias [E, N] or 0, out [R, N]: address and
    strides in bytes, except for the last one of bias and out. Raise ValueError for places out of range."""

def run_layer(
    transfer: Transfer,
    compared: tuple[Sequence[int], Sequence[int]],
    label: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    transposed: bool,
    results: Heap,
    threads: int,
    spans: tuple[Any, Any, Any],
) -> tuple[Any, int]:
    """Run dispatch in place, SwiGLU experts and combine. Return the sums [T, D] in a block of ``results``, None if they
    are empty, and the number of rows of this rank's experts.

    compared: of the dispatch and the combine. inputs: tokens [T, D], ids [T, K], routing weights [T, K] in fp32; ids of
    tokens whose weights are not finite are invalid. weights: w13 [E, 2F, D] and w2 [E, D, F] of this rank's experts,
    with any strides, or [E, D, 2F] and [E, F, D] if ``transposed``; biases [E, 2F] and [E, D]. spans: of dispatch,
    experts and combine, or None.
    """

def grouped_gemm_weights(
    sizes: Sequence[int],
    dtype: int,
    threads: int,
    y: GemmRows,
    x: GemmRows,
    out: Sequence[int],
    out_dtype: int,
    accumulate: bool,
) -> None:
    """out[e] = sum over the rows of expert e of y[r]^T x[r], or added to out. out [E, N, K]: address and strides."""

def swiglu_experts(
    sizes: Sequence[int],
    dtype: int,
    threads: int,
    x: GemmRows,
    stacks: Sequence[Sequence[int]],
    shape: tuple[int, int],
    buffers: tuple[int, int, int],
    out: Sequence[int],
) -> None:
    """out [R, D] = act @ w2[e].T + b2[e], with act = SwiGLU of h = x @ w13[e].T + b13[e].

    stacks: w13, w2, b13 and b2, address and strides as of ``grouped_gemm``; biases may be 0. shape: D, F. buffers: h
    [R, 2F] and 1, or 0 if only the memory of a batch of experts is given; act of a batch.
    """

def swiglu_experts_backward(
    sizes: Sequence[int],
    dtype: int,
    threads: int,
    rows: tuple[GemmRows, GemmRows],
    stacks: Sequence[Sequence[int]],
    shape: tuple[int, int],
    buffers: tuple[int, int, int, int, int],
    weights: tuple[int, int],
    grad_x: Sequence[int],
    grads: Sequence[Sequence[int]],
) -> None:
    """The backward pass of ``swiglu_experts`` without biases.

    rows: x, which is read for the gradient of w13 and if h is 0, and the gradient of out. buffers: h [R, 2F] or 0 and
    its stride in elements; act and grad_h, of a batch of experts if the last number is 1, else of all rows. weights: by
    which act and grad_h are multiplied [R], and their gradients [R]; each may be 0. grad_x: address or 0, and stride.
    grads: of w13 and w2: address or 0, strides and dtype.
    """

def gemm_isa_names(dtype: int, /) -> list[str]: ...
def gemm_isa(dtype: int, /) -> str: ...
def set_gemm_isa(dtype: int, name: str, /) -> bool: ...
