"""The ranks of ``moe-comm serve``: attention ranks with a server each, and expert ranks.

    client ── rank 0 ─┬─ server of rank 0, model without experts ─┐
       (balancer)     └─ server of rank 1, model without experts ─┴─ rank 2, experts

With one attention rank, its server listens for the clients.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.comm.group_setup import channel_of, group_or_default
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.integrations.hugging_face.families import find_experts
from moe_comm.integrations.hugging_face.server import FORCE_S, ModelServer, require_server
from moe_comm.integrations.hugging_face.swap import swapped_experts
from moe_comm.integrations.offload.cache import ExpertOffload
from moe_comm.integrations.pretrained import from_pretrained, weights_folder
from moe_comm.integrations.serving import serve_experts, serving
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ExpertPlacement

LOOPBACK = "127.0.0.1"
LOOK_S = 0.05
"""Interval at which an attention rank looks whether it still serves."""
BACKLOG = 2048
"""Connections that wait to be accepted."""
BUFFER = 1 << 16
PAGE = 256
"""Tokens of a page of transformers' KV cache."""


@dataclass(frozen=True)
class ServeConfig:
    """Settings of ``moe-comm serve``.

    Attributes:
        model: a folder, or the name of a model on the hub.
        attention, experts: numbers of ranks. Without expert ranks, the attention ranks have the experts.
        port: 0: a free one.
        device: "cpu" or "cuda"; None: as ``init_ranks``.
        batching: how an attention rank runs several requests; None: one after the other.
        micro_batches: forward passes of an attention rank that run at the same time.
        offload: see ``offload_experts``; None: experts are in memory.
        recover: whether the other ranks go on after one has died, see ``serving``.
    """

    model: str
    attention: int
    experts: int
    host: str
    port: int
    dtype: str = "auto"
    device: str | None = None
    batching: Batching | None = None
    micro_batches: int = 1
    offload: ExpertOffload | None = None
    recover: bool = False

    @property
    def may_die(self) -> range:
        """Ranks without which the server goes on: all but that of the clients."""
        return range(1, self.attention + self.experts) if self.recover else range(0)


@dataclass(frozen=True)
class Batching:
    """Continuous batching.

    Attributes:
        kv_tokens: tokens in the KV cache of an attention rank.
        batch_tokens: most tokens in a forward pass.
    """

    kv_tokens: int
    batch_tokens: int

    @property
    def pages(self) -> int:
        """Pages of the KV cache."""
        return -(-self.kv_tokens // PAGE)

    def options(self) -> dict[str, Any]:
        """Return the options of ``transformers serve``."""
        return {
            "continuous_batching": True,
            "cb_num_blocks": self.pages,
            "cb_max_batch_tokens": self.batch_tokens,
        }


def serve_rank(config: ServeConfig) -> int:
    """Run a rank until a signal. Return the signal. Collective.

    Raises:
        ConfigError: the model cannot be read, or the address is in use. On all ranks.
        MissingDependency: a package is not installed.
        PeerError: another rank failed.
        PeerRaised: another rank raised.
    """
    require_server()
    with init_ranks(config.device) as ranks, ExitStack() as stack:
        group = group_or_default(None)
        channel = channel_of(group) if group is not None and ranks.world > 1 else None
        sockets, ports = _listen(config, ranks.rank, channel)
        for one in sockets:
            stack.enter_context(closing(one))
        placement = separate_experts(config.model, config.attention, config.experts) if config.experts else None
        settings: dict[str, Any] = {"dtype": config.dtype, "placement": placement, "offload": config.offload}
        model = from_pretrained(config.model, device=ranks.device, **settings)
        stopped = stack.enter_context(_signals())
        checkpoint = weights_folder(config.model, {}) if config.recover else None
        if ranks.rank >= config.attention:
            serve_experts(model, checkpoint=checkpoint, micro_batches=config.micro_batches)
        else:
            with serving(model, checkpoint=checkpoint, micro_batches=config.micro_batches) as context:
                context.calibrate()
                _serve(model, config, sockets, ports, stopped)
        return stopped[0] if stopped else 0


def separate_experts(path: str, attention: int, experts: int) -> list[int]:
    """Return the number of experts of each rank if the first ``attention`` ranks run the model in ``path``, and the
    next ``experts`` ranks have its experts.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        described = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration in {path} cannot be read: {error}") from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described)
    count = next(iter(find_experts(model).values()))[1].num_experts
    return [0] * attention + list(ExpertPlacement.balanced(count, experts).experts_per_rank)


def _listen(config: ServeConfig, rank: int, channel: Any) -> tuple[list[socket.socket], list[int]]:
    """Return the sockets of this rank, that for clients first, and the ports of the servers of all attention ranks."""
    sockets: list[socket.socket] = []
    outcome: str | MoeCommError = ""
    try:
        if rank == 0:
            sockets.append(_socket(config.host, config.port))
        if rank < config.attention > 1:
            sockets.append(_socket(LOOPBACK, 0))
        outcome = str(sockets[-1].getsockname()[1]) if sockets else ""
    except (OSError, OverflowError) as error:
        outcome = ConfigError(f"cannot listen on {config.host}:{config.port}: {error}")
    ports = agree(outcome, lambda text: [text] if channel is None else gather_texts(channel, "the ports", text))
    return sockets, [int(port) for port in ports if port]


def _socket(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Context in which SIGINT and SIGTERM are noted. Yields those received."""
    received: list[int] = []
    before = {
        kind: signal.signal(kind, lambda kind, _: received.append(kind)) for kind in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _serve(model: Any, config: ServeConfig, sockets: list[socket.socket], ports: list[int], stopped: list[int]) -> None:
    """Serve until a signal, or until another rank ends.

    Raises:
        MoeCommError: the server ended unexpectedly.
    """
    settings = config.batching.options() if config.batching else {}
    longest = config.batching.pages // config.micro_batches * PAGE if config.batching else None
    rounds: Any = next(iter(swapped_experts(model).values())).rounds
    with ExitStack() as stack:
        if len(sockets) == 2:
            stack.enter_context(closing(Balancer(sockets[0], ports)))
        server = stack.enter_context(closing(ModelServer(model, config.model, sockets[-1], settings, longest)))
        host, port, *_ = sockets[0].getsockname()
        if sockets[0] is not sockets[-1] or config.attention == 1:
            print(f"Serving {config.model} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        while not stopped and not server.ended and (rounds is None or rounds.error is None):
            time.sleep(LOOK_S)
        if not stopped and (reason := server.ended):
            raise MoeCommError(reason)


class Balancer:
    """Forward each connection to the server with the fewest open connections, in a thread.

    A server that refuses a connection has ended, and gets no more.

    Args:
        listening: socket for clients.
        ports: of the servers, on loopback.
    """

    def __init__(self, listening: socket.socket, ports: list[int]) -> None:
        self._open, self._ended = dict.fromkeys(ports, 0), set[int]()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="balancer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the servers have ended all connections, for at most ``FORCE_S`` seconds, and end them."""
        deadline = time.monotonic() + FORCE_S
        while any(self._open.values()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, listening: socket.socket) -> None:
        self._loop.run_until_complete(asyncio.start_server(self._forward, sock=listening))
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())
        self._loop.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Python 3.11 prints a traceback for a callback of connections that is cancelled.
        with suppress(OSError, asyncio.CancelledError), closing(writer):
            port, from_server, to_server = await self._connect()
            try:
                with closing(to_server):
                    copies = [asyncio.create_task(_copy(reader, to_server))]
                    copies.append(asyncio.create_task(_copy(from_server, writer)))
                    try:
                        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for copy in copies:
                            copy.cancel()
            finally:
                self._open[port] -= 1

    async def _connect(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a server, and count the connection."""
        while True:
            port = min((one for one in self._open if one not in self._ended), key=self._open.__getitem__)
            self._open[port] += 1
            try:
                return port, *await asyncio.open_connection(LOOPBACK, port)
            except BaseException as error:
                self._open[port] -= 1
                if not isinstance(error, ConnectionRefusedError) or self._open.keys() <= self._ended | {port}:
                    raise
                self._ended.add(port)  # its rank has died


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of ``reader``, or until an error of either."""
    with suppress(OSError):
        while data := await reader.read(BUFFER):
            writer.write(data)
            await writer.drain()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
