"""The planner's choice of parallel settings for given rates: measured facts, constraints, and what is never chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_comm.bench.train.settings import TRAIN_PRESETS, TrainBench
from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.train.auto.choose import choose, resolved, search_space, workload
from moe_comm.train.auto.rates import host_size
from moe_comm.train.config import CHOSEN, TrainConfig, load
from moe_comm.train.loop.build import architecture_of
from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import Accelerator, Cluster, GemmTile
from moe_plan.search.request import PlanRequest
from moe_plan.search.search import search

CORE = Accelerator(
    "core",
    flops={"fp32": 98e9},
    efficiency={"fp32": 1.0},
    memory_bytes=12 << 30,
    memory_bytes_per_s=8e9,
    units=1,
    tiles=(GemmTile(1, 1),),
    fill_k=0,
    memory_reach=1.0,
    launch_s=7.5e-5,
    attention_forward=0.27,
    attention_backward=0.29,
    sustained=0.95,
)
GBIT = Link("1 Gbit/s", 80e6, 1e-4, 1.0)
"""What gloo reaches over 1 Gbit/s."""
FAST = Link("fast", 20e9, 1e-6, 1.0)
MEASURED_MS = {
    ("comm", "parallel.ep=2", "parallel.sharding=replicate", "parallel.overlap_chunks=0"): 2534,
    ("comm", "parallel.ep=2", "parallel.sharding=fsdp", "parallel.overlap_chunks=0"): 2548,
    ("comm", "parallel.ep=1", "parallel.sharding=replicate", "parallel.overlap_chunks=0"): 1554,
    ("comm", "parallel.ep=2", "parallel.sharding=replicate"): 2325,
    ("compute", "parallel.ep=2", "parallel.sharding=zero1", "parallel.overlap_chunks=0"): 2115,
}
"""Steps of ``bench train`` on 2 hosts of one rank, joined at 1 Gbit/s, with gradients summed after backward. Without
overlap_chunks: the fastest."""


def two_hosts(link: Link) -> Cluster:
    return Cluster(CORE, 2, 1, link, link, start_s=3 * link.latency_s, direct=True)


def config_of(preset: str, *overrides: str) -> TrainConfig:
    bench = TrainBench(**TRAIN_PRESETS[preset])
    settings = [text for text in bench.overrides if not text.startswith("parallel.")]
    return load(None, [*settings, "parallel=auto", *overrides])


def shape_of(config: TrainConfig) -> ModelShape:
    return ModelShape.of(architecture_of(config, None))


def fastest_ms(config: TrainConfig, cluster: Cluster) -> float:
    request = PlanRequest(shape_of(config), cluster, workload(config, shape_of(config)), config.data.batch, reserve=0)
    return 1e3 * search(request, search_space(config)).best[0].step.seconds


@pytest.mark.parametrize(("settings", "measured_ms"), MEASURED_MS.items(), ids=str)
def test_measured_steps_are_predicted(settings: tuple[str, ...], measured_ms: float) -> None:
    preset, *overrides = settings
    config = config_of(preset, "parallel.pp=1", "parallel.overlap_gradients=off", *overrides)
    assert fastest_ms(config, two_hosts(GBIT)) == pytest.approx(measured_ms, rel=0.2)


def test_many_small_experts_are_replicated_over_a_slow_link() -> None:
    config = config_of("comm")
    choice = choose(config, shape_of(config), two_hosts(GBIT))
    assert (choice.settings["dp"], choice.settings["ep"]) == (2, 1)
    assert choice.text.count("\n") == 0 and "Next best: " in choice.text and "gradient sums" in choice.text


def test_the_link_decides_whether_experts_are_divided() -> None:
    """Dispatch sends more bytes than bf16 gradients, but each rank updates fewer experts."""
    config = config_of(
        "comm",
        "data.batch=4",
        "model.capacity=1.0",
        "parallel.backend=all_to_all",
        "parallel.overlap_chunks=0",
        "parallel.sharding=replicate",
        "parallel.compress=true",
    )
    chosen = [choose(config, shape_of(config), two_hosts(link)).settings["ep"] for link in (GBIT, FAST)]
    assert chosen == [1, 2]


def test_few_large_experts_are_divided_over_a_slow_link() -> None:
    config = config_of("compute")
    assert choose(config, shape_of(config), two_hosts(GBIT)).settings["ep"] == 2


def test_resolved_settings_are_explicit_and_load_unchanged() -> None:
    config = config_of("comm")
    choice = choose(config, shape_of(config), two_hosts(GBIT))
    result = resolved(config, 2, choice.settings)
    assert not result.parallel.auto and result.parallel.mapping(2).ep == 1 and result.parallel.ranks == 2
    assert {name for name in CHOSEN if getattr(result.parallel, name) is None} <= {"virtual", "overlap_chunks"}
    assert result.data == config.data and result.model == config.model


@pytest.mark.parametrize(
    "given",
    [
        ("parallel.ep=2",),
        ("parallel.sharding=fsdp",),
        ("parallel.overlap_chunks=3", "parallel.ep=2"),
        ("parallel.ep=2", "parallel.backend=all_gather"),
        ("parallel.pp=2", "parallel.schedule=gpipe", "data.micro_batches=2"),
        ("parallel.cp=2",),
        ("parallel.tp=2",),
        ("parallel.interleave=true", "parallel.overlap_chunks=auto", "data.micro_batches=2"),
        ("parallel.interleave=true", "parallel.overlap_chunks=auto", "data.micro_batches=4", "parallel.pp=2"),
    ],
    ids=" ".join,
)
def test_given_keys_are_kept(given: tuple[str, ...]) -> None:
    config = config_of("comm", *given)
    one_host = replace(two_hosts(FAST), host_size=2)
    cluster = one_host if given in (("parallel.cp=2",), ("parallel.tp=2",)) else two_hosts(GBIT)
    result = resolved(config, 2, choose(config, shape_of(config), cluster).settings)
    for name in config.parallel.model_fields_set & set(CHOSEN):
        assert getattr(result.parallel, name) == getattr(config.parallel, name)
    assert result.parallel.mapping(2).world == 2


def hosts_of_two(between: Link) -> Cluster:
    return replace(two_hosts(between), gpus=4, host_size=2, inside=FAST)


def test_the_link_between_hosts_decides_whether_shards_are_replicated() -> None:
    config = config_of("comm", "parallel.sharding=fsdp", "parallel.pp=1", "parallel.ep=1", "data.batch=16")
    for link, replicas in ((GBIT, 2), (FAST, 1)):
        choice = choose(config, shape_of(config), hosts_of_two(link))
        result = resolved(config, 4, choice.settings)
        assert result.parallel.dp_replicate == replicas
        assert ("fsdp, dp_replicate 2" in choice.text.partition("Next best")[0]) == (replicas == 2)
    for kind in ("relocate", "fixed"):
        given = config_of("comm", "parallel.sharding=fsdp", "parallel.ep=1", "data.batch=16", f"placement.kind={kind}")
        assert search_space(given).replicas == (1 if kind == "relocate" else None)


def test_schedules_that_split_backward_are_not_chosen_where_runs_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "zbv" in search_space(config_of("comm", "placement.balance={rows = 1.0}")).schedule
    monkeypatch.setattr("moe_comm.train.auto.choose.SPLITS_BACKWARD", False)  # torch 2.11
    assert search_space(config_of("comm")).schedule == ("1f1b", "interleaved_1f1b")
    assert "zbv" in search_space(config_of("comm", "model.recompute=full")).schedule
    assert search_space(config_of("comm", "parallel.schedule=zbv")).schedule == ("zbv",)


@pytest.mark.parametrize("replicas", [1, 2])
def test_given_replicas_are_kept(replicas: int) -> None:
    link = GBIT if replicas == 1 else FAST
    settings = ("parallel.pp=1", "data.batch=16", f"parallel.dp_replicate={replicas}")
    config = config_of("comm", *settings, *(("parallel.sharding=fsdp",) if replicas == 1 else ()))
    result = resolved(config, 4, choose(config, shape_of(config), hosts_of_two(link)).settings)
    assert (result.parallel.sharding, result.parallel.dp_replicate) == ("fsdp", replicas)
    config = config_of("comm", "parallel.dp_replicate=3")
    with pytest.raises(ConfigError, match=r"sharding and 3 replicas do not apply.*given: dp_replicate = 3"):
        choose(config, shape_of(config), hosts_of_two(GBIT))


def test_given_replicas_that_contradict_other_keys_raise() -> None:
    with pytest.raises(ConfigError, match='dp_replicate requires sharding = "fsdp"'):
        config_of("comm", "parallel.sharding=zero1", "parallel.dp_replicate=2")
    with pytest.raises(ConfigError, match=r'placement.kind = "relocate" requires parallel.dp_replicate = 1'):
        config_of("comm", "placement.kind=relocate", "parallel.dp_replicate=2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("parallel.dp=3", "no mapping .* given: dp = 3"),
        ("parallel.tp=2", "tp or etp would exceed a host.* given: tp = 2"),
        ("parallel.backend=hierarchical", "dispatcher hierarchical does not apply.* given: backend = hierarchical"),
        ("parallel.stage_layers=[1, 3]", "stage_layers requires pp"),
    ],
)
def test_given_keys_without_a_mapping_raise(given: str, message: str) -> None:
    config = config_of("comm", given)
    with pytest.raises(ConfigError, match=message):
        resolved(config, 2, choose(config, shape_of(config), two_hosts(GBIT)).settings)


def test_too_little_memory_raises() -> None:
    config = config_of("comm")
    small = replace(two_hosts(GBIT), accelerator=replace(CORE, memory_bytes=32 << 20))
    with pytest.raises(ConfigError, match=r"no mapping fits memory; given: nothing. Nearest: "):
        choose(config, shape_of(config), small)


def test_settings_that_change_results_are_offered_but_not_chosen() -> None:
    config = config_of("comm")
    choice = choose(config, shape_of(config), two_hosts(GBIT))
    assert "bf16 gradients (parallel.compress = true) would save" in choice.text
    divided = config_of("comm", "parallel.ep=2")
    text = choose(divided, shape_of(divided), two_hosts(GBIT)).text
    assert '"fp8_block") would save' in text and "(parallel.deterministic = false) would save" in text
    for one in (config, divided):
        result = resolved(one, 2, choose(one, shape_of(one), two_hosts(GBIT)).settings)
        assert result.parallel.deterministic and not result.parallel.compress and result.payload == config.payload


def test_settings_that_are_set_are_priced_and_not_offered() -> None:
    given = ("comm", "parallel.ep=1", "parallel.overlap_gradients=off")
    plain, compressed = config_of(*given), config_of(*given, "parallel.compress=true")
    assert fastest_ms(compressed, two_hosts(GBIT)) < 0.85 * fastest_ms(plain, two_hosts(GBIT))
    assert "parallel.compress" not in choose(compressed, shape_of(compressed), two_hosts(GBIT)).text
    names = ("dispatch", "combine", "dispatch_backward", "combine_backward")
    narrow = config_of("comm", "parallel.ep=2", *(f"payload.{name}=fp8_block" for name in names))
    assert fastest_ms(narrow, two_hosts(GBIT)) < 0.75 * fastest_ms(config_of("comm", "parallel.ep=2"), two_hosts(GBIT))


def test_close_predictions_prefer_fewer_axes() -> None:
    """On one host, a pipeline saves less than the error of a prediction over data parallelism."""
    config = config_of("compute", "data.micro_batches=2")
    one_host = replace(two_hosts(FAST), host_size=2)
    choice = choose(config, shape_of(config), one_host)
    assert choice.settings["dp"] == 2 and choice.settings["pp"] == 1


def test_overlap_is_chosen_only_if_it_hides_something() -> None:
    for given in (("parallel.pp=2",), ("parallel.pp=1",)):
        config = config_of("compute", "data.micro_batches=2", "parallel.ep=1", *given)
        result = resolved(config, 2, choose(config, shape_of(config), two_hosts(GBIT)).settings)
        assert not result.parallel.overlap_chunks


def test_overlap_is_chosen_over_a_slow_link() -> None:
    config = config_of("compute", "parallel.ep=2", "parallel.pp=1")
    result = resolved(config, 2, choose(config, shape_of(config), two_hosts(GBIT)).settings)
    assert result.parallel.overlap_chunks == "auto"


def test_transfers_that_occupy_the_cores_hide_nothing() -> None:
    serial = ("parallel.overlap_chunks=0", "parallel.overlap_gradients=off")
    mapping = ("parallel.ep=2", "parallel.pp=1", "parallel.sharding=replicate", "parallel.backend=all_to_all")
    with_overlap, without = config_of("compute", *mapping), config_of("compute", *mapping, *serial)
    for processor in (0.0, 1.0):
        cluster = two_hosts(replace(GBIT, processor=processor))
        hidden = 1 - fastest_ms(with_overlap, cluster) / fastest_ms(without, cluster)
        assert hidden > 0.1 if processor == 0.0 else hidden == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("hosts", "size"), [("a", 1), ("aa", 2), ("ab", 1), ("aabb", 2), ("abab", 1), ("aab", 1), ("aabbcc", 2)]
)
def test_hosts_are_found_from_the_ranks(hosts: str, size: int) -> None:
    assert host_size(list(hosts)) == size
