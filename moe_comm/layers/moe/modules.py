"""Build an ``MoELayer`` from modules, and convert it back: ``MoELayer.from_modules`` and ``MoELayer.to_modules``.

    router     nn.Linear ─▶ Router, others ─▶ ModuleRouter
    expert e   w1, w3 ─▶ w13[i], w2 ─▶ w2[i]     position i of the experts on the rank that is its home

What the experts compute is recognised from the first one. Each rank then compares each of its experts with the result,
forward and backward on random rows in fp32, before the layer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import communicator_of, group_rank, group_size
from moe_comm.dispatch import Dispatcher, DispatchOptions
from moe_comm.errors import ConfigError, MoeCommError, UnsupportedModel
from moe_comm.layers.data_parallel.expert_shard import ExpertShards, is_dtensor
from moe_comm.layers.data_parallel.replicas import check_loaded
from moe_comm.layers.moe.config import LayerSettings, MoEConfig, MoEGroups, build_dispatcher, build_experts, check_etp
from moe_comm.layers.moe.expert_parallel import ExpertParallel, overlap_of
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.formula import ExpertFormula, MoEBlock
from moe_comm.layers.moe.module_router import ModuleRouter, linear_router, try_router
from moe_comm.layers.moe.recognise import copy_of_expert, output_of, recognise_experts, run_stacked
from moe_comm.layers.moe.router import Router, RouterConfig
from moe_comm.layers.moe.trial import SEED, difference
from moe_comm.layers.parallel.hooks import refuse_hooks
from moe_comm.topology import Placement, Sharding, Split

L = TypeVar("L")
CALL = "MoELayer.from_modules"
STACKS = {"w13": "gate_up_proj", "w2": "down_proj", "b13": "gate_up_proj_bias", "b2": "down_proj_bias"}
"""Names in ``ExpertsLayout`` of the parameters of ``Experts``."""


@dataclass(frozen=True, eq=False)
class ModuleOrigin:
    """The modules that a layer was built from, without their weights.

    experts: as they were given, on meta. router: on meta; None if the layer's router has the user's.
    """

    experts: Any
    formula: ExpertFormula
    router: nn.Linear | None


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """The router and the experts that ``MoELayer.from_modules`` is called with; see there."""

    router: Any
    experts: Any
    top_k: int | None
    routing: RouterConfig | None
    description: MoEBlock | None

    def build(self, kind: Callable[..., L], groups: MoEGroups, settings: LayerSettings) -> L:
        """Return a layer of class ``kind``. Collective; see ``MoELayer.from_modules``."""
        if unknown := settings.keys() - LayerSettings.__annotations__.keys():
            raise TypeError(f"{CALL} got an unexpected keyword argument {min(unknown)!r}")
        rest: dict[str, Any] = dict(settings)
        of_layer = {key: rest.pop(key) for key in ("label", "overlap", "shared") if key in rest}
        of_layer["overlap"] = overlap = overlap_of(of_layer.get("overlap"))
        backend, options = rest.pop("backend", "auto"), rest.pop("options", None)
        read = self._agreed(partial(MoEConfig, **rest), groups, options)
        dispatcher = build_dispatcher(read.config, groups, backend, options, overlap, **read.factory)
        parts = read.router(groups), read.experts(groups, dispatcher), dispatcher
        layer: Any = kind(*parts, capacity=read.config.capacity, **of_layer)
        layer.origin = read.origin()
        return layer  # type: ignore[no-any-return]

    def _agreed(
        self, settings: Callable[..., MoEConfig], groups: MoEGroups, options: DispatchOptions | None
    ) -> ReadModules:
        """Return what the modules compute, after all ranks have agreed that they can be converted. Collective.

        settings: returns the configuration, given its first fields.
        """
        fault: MoeCommError | None = None
        read: ReadModules | None = None
        weights = nn.Module()
        try:
            source = replace(self, experts=_collected(self.experts))
            named = named_experts(source.experts)
            device = named.example.device
            with torch.random.fork_rng([] if device.type in ("cpu", "meta") else [device]):
                torch.manual_seed(SEED)
                read = source._read(named, settings, groups)
            weights.experts = named.module
            if isinstance(self.router, nn.Module):
                weights.router = self.router
        except MoeCommError as error:
            fault = error
        except Exception as error:  # of the user's code: the other ranks wait
            fault = UnsupportedModel(f"{CALL}: the modules raised {type(error).__name__}: {error}")
            fault.__cause__ = error
        if group_size(groups.experts) > 1:
            assert groups.experts is not None
            timeout_s = (options or DispatchOptions()).timeout_s
            check_loaded(weights, Channel(communicator_of(groups.experts, timeout_s), timeout_s), fault)
        if fault is not None:
            raise fault
        assert read is not None
        return read

    def _read(self, named: NamedExperts, settings: Callable[..., MoEConfig], groups: MoEGroups) -> ReadModules:
        _refuse(named)
        device = torch.get_default_device() if named.example.is_meta else named.example.device
        formula = self._formula(named, device)
        layout, params, names = formula.layout, named.params, set(formula.names)
        if layout.num_experts != named.count:
            raise ConfigError(f"{CALL}: {named.count} experts were given; described are {layout.num_experts}")
        if other := [name for name in params if name not in names]:
            raise UnsupportedModel(
                f"{CALL}: the experts also have the parameter {other[0]}, which is no part of {formula}"
            )
        trained: dict[str, bool] = {}
        for name, key in STACKS.items():
            if key in formula.parts:
                stacked = [one for part in formula.parts[key] for one in formula.names_of(part.path)]
                if len(requires := {params[one].requires_grad for one in stacked}) > 1:
                    raise UnsupportedModel(f"{CALL}: only some of {stacked[0]} ... {stacked[-1]} require gradients")
                trained[name] = requires.pop()
        routing, runs_empty = self._routing(layout.hidden, named, device)
        config = settings(layout.hidden, layout.ffn, routing, layout.activation, layout.bias)
        check_etp(config, groups)
        placement = config.placement_on(group_size(groups.experts) // groups.etp)
        for expert in placement.homes_of(group_rank(groups.experts) // groups.etp):
            _compare(named, formula, expert, device, strict=self.description is None)
        return ReadModules(self, named, formula, config, trained, runs_empty)

    def _formula(self, named: NamedExperts, device: torch.device) -> ExpertFormula:
        try:
            if self.description is not None:
                return self.description.formula(named.module)
            return recognise_experts(named.module, named.count, device, stacked=named.stacked)[0]
        except UnsupportedModel as error:
            advice = "" if self.description is not None else ". Name the parameters with description=MoEBlock(...)"
            raise UnsupportedModel(f"{CALL}: {error}{advice}") from error

    def _routing(self, hidden: int, named: NamedExperts, device: torch.device) -> tuple[RouterConfig, bool]:
        """Return the configuration of the router, and whether it takes zero tokens."""
        router, experts = self.router, named.count
        if isinstance(router, Router):
            if self.top_k is not None or self.routing is not None:
                raise ConfigError(f"{CALL}: a moe_comm.Router has its own configuration; pass no top_k and no routing")
            if (router.hidden, router.config.num_experts) != (hidden, experts):
                raise ConfigError(
                    f"{CALL}: the router is for {router.config.num_experts} experts of hidden size {router.hidden}; "
                    f"the {experts} experts have hidden size {hidden}"
                )
            return router.config, True
        if is_linear(router):
            refuse_hooks(CALL, [("router", router)], router.named_parameters("router"))
            config = self._config(experts)
            if (router.in_features, router.out_features) != (hidden, config.num_choices):
                raise ConfigError(
                    f"{CALL}: the router maps {router.in_features} values to {router.out_features} logits; the "
                    f"{experts} experts of hidden size {hidden} need a router from {hidden} to {config.num_choices}"
                )
            return config, True
        if not callable(router):
            raise ConfigError(f"{CALL}: the router must be a module or another callable; got {type(router).__name__}")
        choices = experts if self.routing is None else self.routing.num_choices
        top_k, runs_empty = try_router(router, hidden, choices, device, named.example.dtype)
        if not top_k:
            return self._config(experts), runs_empty
        if self.routing is not None or self.top_k not in (None, top_k):
            raise ConfigError(
                f"{CALL}: the router returns the ids and weights of {top_k} experts itself; pass no routing, and no "
                f"other top_k (got {self.top_k})"
            )
        return RouterConfig(experts, top_k), runs_empty

    def _config(self, experts: int) -> RouterConfig:
        """Return how to select experts by logits."""
        if self.routing is None:
            if self.top_k is None:
                raise ConfigError(f"{CALL}: pass top_k, or routing=RouterConfig(...), for a router that returns logits")
            return RouterConfig(experts, self.top_k)
        if self.routing.num_experts != experts or self.top_k not in (None, self.routing.top_k):
            raise ConfigError(
                f"{CALL}: routing is for top-{self.routing.top_k} of {self.routing.num_experts} experts; got top_k = "
                f"{self.top_k} and {experts} experts"
            )
        return self.routing


@dataclass(frozen=True, eq=False)
class ReadModules:
    """Modules that can be converted to an ``MoELayer``.

    trained: whether a parameter of ``Experts`` requires gradients, by name.
    runs_empty: the router takes zero tokens.
    """

    source: ModuleSource
    named: NamedExperts
    formula: ExpertFormula
    config: MoEConfig
    trained: Mapping[str, bool]
    runs_empty: bool

    @property
    def factory(self) -> dict[str, Any]:
        """The dtype and the device of the experts."""
        return {"dtype": self.named.example.dtype, "device": self.named.example.device}

    def router(self, groups: MoEGroups) -> Router:
        """Return the router of the layer."""
        router, config = self.source.router, self.config
        if isinstance(router, Router):
            return router
        if is_linear(router):
            return linear_router(router, config.router, groups)
        return ModuleRouter(config.hidden, config.router, groups, router, runs_empty=self.runs_empty, **self.factory)

    @torch.no_grad()
    def experts(self, groups: MoEGroups, dispatcher: Dispatcher) -> Experts:
        """Return the experts of this rank."""
        experts = build_experts(self.config, groups, dispatcher, **self.factory)
        assert dispatcher.expert_placement is not None
        homes = dispatcher.expert_placement.homes_of(dispatcher.rank // groups.etp)
        place, sizes, params = {"etp": experts.part.index}, {"etp": experts.part.count}, self.named.params
        for name, trained in self.trained.items():
            param, sharding = getattr(experts, name), experts.sharding_of_one(name)
            for i, expert in enumerate(homes):
                full = self.formula.of_expert(STACKS[name], params, expert)
                param[i].copy_(sharding.take(full, place, sizes))
            param.requires_grad_(trained)
        return experts

    def origin(self) -> ModuleOrigin:
        """Return what ``to_modules`` needs."""
        router = self.source.router
        return ModuleOrigin(
            _on_meta(self.source.experts), self.formula, _on_meta(router) if is_linear(router) else None
        )


def is_linear(router: Any) -> bool:
    """Return whether the logits are those of ``nn.Linear``."""
    plain = isinstance(router, nn.Linear) and type(router).forward is nn.Linear.forward
    return plain and not router._modules and not (router._forward_hooks or router._forward_pre_hooks)


@dataclass(frozen=True, eq=False)
class NamedExperts:
    """The experts of a user as one module: a list with an item for each, or a module with stacked parameters."""

    module: Any
    count: int
    stacked: bool

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in a formula."""
        return dict(self.module.named_parameters(remove_duplicate=False))

    @property
    def example(self) -> nn.Parameter:
        """Any parameter."""
        return next(iter(self.params.values()))


def _collected(experts: Any) -> Any:
    """Return the experts that a user passed, in a list if they come from an iterator.

    Raises:
        ConfigError: they have no order, or are no collection.
    """
    if isinstance(experts, nn.Module | Mapping | Sequence):
        return experts
    if isinstance(experts, Set) or not isinstance(experts, Iterable):
        raise ConfigError(f"{CALL}: experts must be a module, a list or a dict; got {type(experts).__name__}")
    return list(experts)


def named_experts(experts: Any) -> NamedExperts:
    """Return the experts that a user passed as a list, a dict, or a module.

    Raises:
        ConfigError: they are not experts.
    """
    stacked = isinstance(experts, nn.Module) and not isinstance(experts, nn.ModuleList | nn.ModuleDict)
    if stacked:
        counts = {param.shape[0] if param.dim() else 0 for param in experts.parameters()}
        if len(counts) == 1:
            return NamedExperts(experts, counts.pop(), stacked=True)
        raise ConfigError(
            f"{CALL}: {type(experts).__name__} is neither a list of experts nor a module whose parameters are stacked, "
            f"[E, ...]: their first dimensions are {sorted(counts) or 'missing, as it has no parameters'}"
        )
    items = list(experts.values()) if isinstance(experts, Mapping | nn.ModuleDict) else list(experts)
    if not items or not all(isinstance(item, nn.Module) and any(True for _ in item.parameters()) for item in items):
        kinds = sorted({type(item).__name__ for item in items})
        raise ConfigError(f"{CALL}: experts must be modules with parameters; got {', '.join(kinds) or 'none'}")
    return NamedExperts(nn.ModuleList(items), len(items), stacked=False)


def _refuse(named: NamedExperts) -> None:
    """Raise UnsupportedModel if the experts have features that the layer would lose."""
    module, params = named.module, named.params
    shapes = [{n: tuple(p.shape) for n, p in item.named_parameters()} for item in ([] if named.stacked else module)]
    for expert, of_expert in enumerate(shapes):
        if of_expert != shapes[0]:
            raise UnsupportedModel(
                f"{CALL}: expert {expert} has the parameters {of_expert}, and expert 0 {shapes[0]}. All experts must "
                "have the same ones"
            )
    if len({id(param) for param in params.values()}) < len(params):
        raise UnsupportedModel(f"{CALL}: a parameter belongs to several experts, or to an expert twice")
    kinds = {(param.dtype, param.device) for param in params.values()}
    if len(kinds) > 1 or any(is_dtensor(param) for param in params.values()):
        raise UnsupportedModel(f"{CALL}: the parameters of the experts must have one dtype and device; got {kinds}")
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise UnsupportedModel(f"{CALL}: the experts have dropout {part.p} ({name}); set it to 0")
        if part._buffers:
            raise UnsupportedModel(f"{CALL}: the experts have buffers ({name}.{next(iter(part._buffers))})")
    refuse_hooks(CALL, module.named_modules(), params.items())


def _compare(named: NamedExperts, formula: ExpertFormula, expert: int, device: torch.device, *, strict: bool) -> None:
    """Compare an expert with its formula on random rows in fp32, forward and backward.

    strict: the expert must run; else it need not, as a module with stacked parameters may have no forward pass.

    Raises:
        UnsupportedModel: they differ.
    """
    stacked = named.stacked
    for training in (True, False):
        run = copy_of_expert(named.module, expert, named.count, device, torch.float32, stacked=stacked).train(training)
        run.requires_grad_(not stacked)  # gradients of stacked parameters take their whole memory
        own = {(name if stacked else f"{expert}.{name}"): param for name, param in run.named_parameters()}
        x_RD = (4 * torch.randn(8, formula.layout.hidden, device=device, dtype=torch.float32)).requires_grad_()
        grad_RD = torch.randn_like(x_RD)
        wanted: dict[str, Tensor] = {"input": x_RD} | ({} if stacked else own)
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            try:
                y_RD, _ = output_of(run_stacked(run, x_RD, named.count) if stacked else run(x_RD))
            except Exception as error:  # of the user's code
                if strict or not stacked:
                    raise UnsupportedModel(
                        f"{CALL}: expert {expert} raised {type(error).__name__}: {error}, for rows {list(x_RD.shape)}"
                    ) from error
                return
            results = [("output", y_RD, formula.run(x_RD, own, expert))]
            if y_RD is not None and y_RD.requires_grad:
                pairs = [
                    torch.autograd.grad(y, list(wanted.values()), grad_RD, allow_unused=True, materialize_grads=True)
                    for y in (y_RD, results[0][2])
                ]
                results += [(f"gradient of {name}", *pair) for name, *pair in zip(wanted, *pairs, strict=True)]
        texts = (f"its {what} {text}" for what, got, want in results if (text := difference(want, got)))
        if text := next(texts, ""):
            mode = "training" if training else "evaluation"
            raise UnsupportedModel(
                f"{CALL}: the experts were {'recognised' if strict else 'described'} as {formula}, but expert {expert} "
                f"differs in {mode}: {text}"
            )


def _on_meta(modules: Any) -> Any:
    """Return a copy of a module, or of a collection of modules, without memory."""
    items = modules.values() if isinstance(modules, Mapping) else modules
    parts = [modules] if isinstance(modules, nn.Module) else list(items)
    memo: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        for part in parts
        for param in part.parameters()
    }
    return deepcopy(modules, memo)


def modules_of(
    layer: ExpertParallel, router: Router, experts: Experts, origin: ModuleOrigin, *, rank0_only: bool, cpu: bool
) -> tuple[Any, Any]:
    """Return router and experts of a layer; see ``MoELayer.to_modules``. Collective.

    The result is filled expert by expert:

        home of expert e   w13[i] ─▶ all ranks, or rank 0 ─▶ w1, w3 of expert e
    """
    if origin.router is not None and router.correction_bias is not None:
        raise ConfigError(
            f"to_modules of layer {layer.label!r} would return the router as nn.Linear, which cannot hold its "
            "correction_bias. Read layer.router.correction_bias, or build the layer with a moe_comm.Router"
        )
    receives = not rank0_only or layer.dispatcher.rank == 0
    device = torch.device("cpu") if cpu else experts.w13.device
    result, params = None, {}
    if receives:
        result = deepcopy(origin.experts)
        named = named_experts(result)
        named.module.to(experts.w13.dtype).to_empty(device=device)
        params = named.params
    for name, expert, full in _gathered(layer, experts, rank0_only=rank0_only, cpu=cpu):
        if full is not None:
            with torch.no_grad():
                for piece in origin.formula.pieces(STACKS[name], expert):
                    piece.of(params[piece.name]).copy_(full[piece.rows])
    copied = _router_of(router, origin.router, device)
    return (copied, result) if receives else (None, None)


def _gathered(
    layer: ExpertParallel, experts: Experts, *, rank0_only: bool, cpu: bool
) -> Iterator[tuple[str, int, Tensor | None]]:
    """Yield each parameter of each expert, and its name and the expert; None on ranks that do not receive it."""
    placement, group = layer.placement, layer.dispatcher.group
    homes = list(placement.homes_of(layer.place["ep"]))
    for name, param in experts.named_parameters():
        local = _whole(param)
        inner = experts.sharding_of_one(name)
        splits = [replace(split, dim=split.dim + 1) for split in inner.splits]
        for expert in range(placement.num_experts):
            part = local[homes.index(expert) :][:1] if expert in homes else local[:0]
            full: Tensor | None = part
            if group is not None and layer.dispatcher.world > 1:
                home = Split.of_experts(Placement(((placement.homes[expert],),), placement.world))
                one = Sharding((1, *inner.shape), (home, *splits), expert=True)
                shards = ExpertShards(group, {name: one}, layer.place, layer.sizes)
                full = shards.gather(name, part, rank0_only=rank0_only, cpu=cpu)
            yield name, expert, None if full is None else full[0]


def _router_of(router: Router, linear: nn.Linear | None, device: torch.device) -> Any:
    """Return a copy of the router, of the kind that the layer was built from."""
    whole = {name: _whole(param).to(device) for name, param in router.named_parameters()}
    if linear is not None:
        result = deepcopy(linear).to(router.weight.dtype).to_empty(device=device)
        for name, param in result.named_parameters():
            param.data.copy_(whole[name])
        return result
    memo: dict[int, Any] = {
        id(param): nn.Parameter(whole[name].clone(), requires_grad=param.requires_grad)
        for name, param in router.named_parameters()
    }
    if not isinstance(router, ModuleRouter):
        return deepcopy(router, memo).to(device)
    function = router.function
    return deepcopy(function, memo).to(device) if isinstance(function, nn.Module) else function


def _whole(param: Any) -> Tensor:
    full: Tensor = param.full_tensor() if is_dtensor(param) else param
    return full.detach()
