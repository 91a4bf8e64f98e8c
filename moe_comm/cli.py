"""The ``moe-comm`` command: one thin function a subcommand. What they do lives in the modules they call.

Exit codes: 0 done; 1 it failed, or ``doctor`` found something broken; 2 the request was wrong (flags, configuration,
unreadable file, missing extra); 128 + n stopped by signal n.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from moe_comm.errors import ConfigError, MissingDependency, MoeCommError
from moe_comm.runtime import cpu_guard
from moe_comm.runtime.launch import Interrupted, RankFailed, init_ranks, launch

if TYPE_CHECKING:
    from moe_comm.layers.grad_check import CheckGradsConfig, GradReport

USAGE_ERROR = 2
# typer raises click's own exceptions, from whichever copy of click it carries.
_ClickError: type[Exception] = typer.BadParameter.mro()[2]

app = typer.Typer(
    name="moe-comm",
    help="Mixture-of-Experts layers whose experts live on different ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(no_args_is_help=True, help="Measure dispatch and combine, or a whole MoE layer.")
app.add_typer(bench, name="bench")


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Preset(StrEnum):
    comm = "comm"
    compute = "compute"


Ranks = Annotated[int, typer.Option(min=1, help="Ranks to start here; under torchrun its ranks are used.")]
Tokens = Annotated[int, typer.Option(min=0, help="Tokens of each rank.")]
Hidden = Annotated[int, typer.Option(min=1, help="Width of a token's row.")]
Experts = Annotated[int, typer.Option(min=1, help="Experts over all ranks together.")]
TopK = Annotated[int, typer.Option("--top-k", min=1, help="Experts of each token.")]
DtypeOf = Annotated[Dtype, typer.Option(help="Type of the rows.")]
Backend = Annotated[str, typer.Option(help="auto, local, shared_memory, all_to_all or all_gather.")]
DeviceOf = Annotated[Device, typer.Option(help="Where the tensors are.")]
Iterations = Annotated[int, typer.Option(min=0, help="Rounds to take the median of; 0: chosen by size.")]
Warmup = Annotated[int, typer.Option(min=0, help="Rounds to throw away first.")]
Seed = Annotated[int, typer.Option(min=0, help="Of tokens, routing and weights.")]
JsonOut = Annotated[
    str | None, typer.Option("--json", metavar="OUT", help="File for the result; - is standard output.")
]
Peers = Annotated[
    list[str] | None, typer.Option("--peer", help="Compare with this one; repeat for more. [default: all]")
]


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Look at this machine: what is there, what each backend can do, and what to do about what is missing."""
    from moe_comm.runtime import doctor as examination

    report = examination.examine()
    if as_json:
        typer.echo(report.to_json())
    else:
        examination.show(report)
    if not report.healthy:
        raise typer.Exit(1)


@app.command()
def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A .toml or .json file, such as examples/pydoc.toml.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="run.steps=200, and so on.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start here.  [default: parallel.ranks]")] = None,
) -> None:
    """Train a small MoE language model, its experts spread over ranks."""
    configuration = _load("moe_comm.train.config", "train")
    changes = list(overrides or [])
    if ranks is not None:
        changes.append(f"parallel.ranks={ranks}")
    # Read here as well as on the ranks, so that a mistake is reported before anything starts.
    settings = configuration.load(config, changes)
    launch(_train_rank, (config, changes, settings.parallel.timeout_s), settings.parallel.ranks)


def _train_rank(config: str, overrides: list[str], timeout_s: float) -> None:
    from moe_comm import train as training

    with init_ranks("cpu", timeout_s):
        training.run(config, overrides)


@bench.command("dispatch")
def bench_dispatch(
    ranks: Ranks = 2,
    tokens: Tokens = 4096,
    hidden: Hidden = 1024,
    experts: Experts = 64,
    top_k: TopK = 8,
    dtype: DtypeOf = Dtype.float32,
    backend: Backend = "auto",
    device: DeviceOf = Device.cpu,
    backward: Annotated[bool, typer.Option(help="Measure the two backward passes too.")] = True,
    peers: Peers = None,
    warmup: Warmup = 2,
    iterations: Iterations = 0,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Dispatch and combine against torch + gloo, MPICH, and the bare copy of the same bytes."""
    settings = _load("moe_comm.bench.settings", "bench")
    values = _chosen(peers, ranks=ranks, tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, dtype=dtype.value)
    values |= {"backend": backend, "device": device.value, "backward": backward}
    values |= {"warmup": warmup, "iterations": iterations, "seed": seed}
    _load("moe_comm.bench.dispatch", "bench").main(settings.DispatchBench(**values), json_out)


@bench.command("layer")
def bench_layer(
    ranks: Ranks = 2,
    tokens: Tokens = 4096,
    hidden: Hidden = 1024,
    ffn: Annotated[int, typer.Option(min=1, help="Width of each expert.")] = 512,
    experts: Experts = 64,
    top_k: TopK = 8,
    dtype: DtypeOf = Dtype.float32,
    backend: Backend = "auto",
    device: DeviceOf = Device.cpu,
    preset: Annotated[
        Preset | None, typer.Option(help="Shape to use instead: comm (many small experts) or compute (few wide ones).")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure each contestant's peak memory too.")] = True,
    peers: Peers = None,
    warmup: Warmup = 2,
    iterations: Iterations = 0,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """A whole MoE layer, forward and backward, against Hugging Face and torchtitan."""
    settings = _load("moe_comm.bench.settings", "bench")
    values = _chosen(peers, ranks=ranks, tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, dtype=dtype.value)
    values |= {"ffn": ffn, "backend": backend, "device": device.value, "memory": memory}
    values |= {"warmup": warmup, "iterations": iterations, "seed": seed}
    if preset is not None:
        values |= settings.LAYER_PRESETS[preset.value]
    _load("moe_comm.bench.layer", "bench").main(settings.LayerBench(**values), json_out)


@app.command("check-grads")
def check_grads(
    ranks: Ranks = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 37,
    hidden: Hidden = 64,
    ffn: Annotated[int, typer.Option(min=1, help="Width of each expert.")] = 96,
    experts: Experts = 8,
    top_k: TopK = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    backend: Backend = "auto",
    device: DeviceOf = Device.cpu,
    score: Annotated[str, typer.Option(help="How the router scores: softmax, sigmoid or topk_softmax.")] = "softmax",
    shared_ffn: Annotated[int, typer.Option(min=0, help="Width of a shared expert; 0: none.")] = 0,
    deterministic: Annotated[bool, typer.Option(help="Demand equal bits for any number of ranks.")] = True,
    tolerance: Annotated[float | None, typer.Option(help="Largest difference over largest value.")] = None,
    cases: Annotated[list[str] | None, typer.Option("--case", help="Only this one; repeat for more.")] = None,
    seed: Seed = 0,
) -> None:
    """Compare an expert-parallel layer's output and every gradient with one rank's and with float64."""
    from moe_comm.layers.grad_check import CASES, CheckGradsConfig
    from moe_comm.layers.router import Score

    config = CheckGradsConfig(
        hidden=hidden,
        ffn=ffn,
        num_experts=experts,
        top_k=top_k,
        tokens=tokens,
        backend=backend,
        dtype=dtype,
        device=device.value,
        score=_one_of("score", score, get_args(Score)),
        shared_ffn=shared_ffn,
        deterministic=deterministic,
        tolerance=tolerance,
        seed=seed,
        cases=tuple(_one_of("case", case, CASES) for case in cases or CASES),
    )
    report = launch(_check_grads_rank, (config,), ranks)[0]
    if report is None:  # under torchrun the first rank speaks for all
        return
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


def _check_grads_rank(config: CheckGradsConfig) -> GradReport | None:
    import torch.distributed as dist

    from moe_comm.layers.grad_check import run_check_grads

    with init_ranks(config.device) as ranks:
        report = run_check_grads(config, dist.group.WORLD if ranks.world > 1 else None)
    return report if ranks.rank == 0 or not report.ok else None


def _one_of(name: str, value: str, known: Sequence[str]) -> Any:
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}; known: {', '.join(known)}")
    return value


def _chosen(peers: list[str] | None, **values: Any) -> dict[str, Any]:
    """Settings to build a benchmark from; ``peers`` only where the user named some."""
    return values if peers is None else values | {"peers": tuple(peers)}


def _load(module: str, extra: str) -> ModuleType:
    """Import one of our modules; a package that it needs and is not there becomes advice to install the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "moe_comm":
            raise
        raise MissingDependency(f"{error.name} is not installed; run: pip install 'moe_comm[{extra}]'") from None


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; whatever was wrong is one line on standard error."""
    cpu_guard.apply()
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="moe-comm", standalone_mode=False)
    except _ClickError as error:
        # Its message carries the option and click's own "Did you mean"; it is empty where help was shown instead.
        return _fail(error.format_message().replace("Value error, ", ""), USAGE_ERROR)  # type: ignore[attr-defined]
    except (ConfigError, MissingDependency) as error:
        return _fail(error, USAGE_ERROR)
    except Interrupted as error:
        return _fail(error, 128 + error.number)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 128 + signal.SIGINT)
    except RankFailed as error:
        if error.details:
            print(error.details, file=sys.stderr)
        return _fail(error, 1)
    except MoeCommError as error:
        return _fail(error, 1)
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}", USAGE_ERROR)
    if code == 128 + signal.SIGINT:  # typer's own answer to an interrupt
        return _fail("interrupted", code)
    return code if isinstance(code, int) else 0


def _fail(error: object, code: int) -> int:
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if text:
        print(f"moe-comm: error: {text}", file=sys.stderr)
    return code


def main() -> None:
    """Entry point of the ``moe-comm`` script."""
    sys.exit(run())
