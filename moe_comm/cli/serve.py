"""``moe-comm serve``: an OpenAI-compatible server over ranks with attention and ranks with experts."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from moe_comm.cli.options import load
from moe_comm.runtime.launch import Interrupted, launch, ranks_to_use

if TYPE_CHECKING:
    from moe_comm.integrations.serve_ranks import ServeConfig

app = typer.Typer()
LOADED = ("torch", "transformers", "moe_comm.integrations.serve_ranks")
"""Slow modules, imported once for all ranks."""


@app.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder with safetensors, or a name on the hub.")],
    attention: Annotated[
        int, typer.Option(min=1, help="Ranks that run the model, each with its own requests and KV cache.")
    ] = 1,
    experts: Annotated[
        int, typer.Option(min=0, help="Ranks that have only experts; 0: the attention ranks have them.")
    ] = 0,
    micro_batches: Annotated[
        int,
        typer.Option(min=1, max=4, help="Forward passes of an attention rank at a time: one computes, one waits."),
    ] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one, which is printed.")
    ] = 8000,
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters; auto: the checkpoint's.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.  [default: cuda if each rank has its own GPU]")
    ] = None,
    continuous_batching: Annotated[
        bool,
        typer.Option("--continuous-batching", help="Run the requests of a rank together, not one after the other."),
    ] = False,
    kv_tokens: Annotated[
        int, typer.Option(min=256, help="With continuous batching: tokens in the KV cache of an attention rank.")
    ] = 16384,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="With continuous batching: most tokens of a rank in a forward pass.")
    ] = 512,
    offload_budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Keep experts out of memory, but for this many bytes a rank, such as 4GiB."),
    ] = None,
    recover: Annotated[
        bool,
        typer.Option("--recover", help="If a rank but the first dies, go on: the others read its experts."),
    ] = False,
    offload_path: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="With an offload budget: a folder on a local disk; on a GPU, host memory."),
    ] = "",
) -> None:
    """Serve a model over ranks with attention and ranks with experts, with transformers' OpenAI-compatible server."""
    module = load("moe_comm.integrations.serve_ranks", "serve")
    batching = module.Batching(kv_tokens, batch_tokens) if continuous_batching else None
    if offload_path and offload_budget is None:
        raise typer.BadParameter("needs --offload-budget", param_hint="--offload-path")
    offload = None if offload_budget is None else module.ExpertOffload(offload_budget, offload_path)
    config = module.ServeConfig(
        model, attention, experts, host, port, dtype, device, batching, micro_batches, offload, recover
    )
    ranks = ranks_to_use(attention + experts)
    if signal.SIGINT in launch(serve_rank, (config,), ranks, preload=LOADED, may_die=config.may_die):
        raise Interrupted(signal.SIGINT)


def serve_rank(config: ServeConfig) -> int:
    """Run a rank, see ``moe_comm.integrations.serve_ranks.serve_rank``."""
    return int(load("moe_comm.integrations.serve_ranks", "serve").serve_rank(config))
