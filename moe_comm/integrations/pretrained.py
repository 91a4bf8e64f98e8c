"""``from_pretrained``: build a transformers model without memory, swap it, and load the part of this rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_comm.comm.group_setup import as_group, group_or_default, group_size
from moe_comm.errors import ConfigError, UnsupportedModel, suggestion
from moe_comm.integrations.checkpoint.files import DTYPES, FLOATS, INDEX, SINGLE, HubFolder
from moe_comm.integrations.checkpoint.load import agree_in, initialize_buffers, load_checkpoint
from moe_comm.integrations.hugging_face.attention import parallelize_attention
from moe_comm.integrations.hugging_face.families import require_transformers
from moe_comm.integrations.hugging_face.linears import parallelize_linears
from moe_comm.integrations.offloading import offload_experts
from moe_comm.integrations.swap import parallelize_moe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_SWAP = ("backend", "options", "overlap", "placement", "expert_gemm_dtype")
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_BUILD = (
    *("config", "dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "device_map", "context"),
    "offload",
)
_NO_EFFECT = {"low_cpu_mem_usage": (True, None), "use_safetensors": (True, None), "weights_only": (True, None)}
"""Settings of transformers that can have these values only, and have no effect."""
_REFUSED = {
    "quantization_config": "weights are not quantized, and those in fp8 are dequantized",
    "load_in_8bit": "weights are not quantized",
    "load_in_4bit": "weights are not quantized",
    "state_dict": "weights are read from the checkpoint; call load_state_dict afterwards",
    "gguf_file": "only safetensors can be read",
    "from_tf": "only safetensors can be read",
    "from_flax": "only safetensors can be read",
    "variant": "only model.safetensors, or its index, can be read",
    "distributed_config": "pass group and tp_group",
    "tp_plan": "pass tp_group",
    "tp_size": "pass tp_group",
    "device_mesh": "pass group and tp_group",
    "max_memory": "each rank has one device",
    "offload_folder": "pass offload = ExpertOffload(budget, path)",
    "offload_state_dict": "pass offload = ExpertOffload(budget, path)",
    "offload_buffers": "pass offload = ExpertOffload(budget, path)",
    "ignore_mismatched_sizes": "each tensor must have the shape of the model's",
    "output_loading_info": "all tensors must match, or an error names them; the model has a load_report",
    "key_mapping": "register the mapping with transformers' register_checkpoint_conversion_mapping",
    "use_kernels": "kernels may replace whole MoE blocks",
    "kernel_config": "kernels may replace whole MoE blocks",
    "experts_implementation": "the experts are replaced by those of moe_comm",
}
"""Settings of transformers that are not supported, and why."""


def from_pretrained(
    path: str | PathLike[str],
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    model_class: Any = None,
    device: torch.device | str | None = None,
    tp_group: ProcessGroup | DeviceMesh | None = None,
    cp_group: ProcessGroup | DeviceMesh | None = None,
    **as_transformers: Any,
) -> Any:
    """Load a transformers model with its experts distributed over ``group``, in little memory. Collective.

        model = moe_comm.from_pretrained(folder, dtype=torch.bfloat16)      # this rank reads and holds only its part

    The result has the same bits as ``swap_moe(AutoModelForCausalLM.from_pretrained(folder), group)``, but no rank reads
    or allocates the whole model: it is built without memory, swapped, and each rank fills its part with
    ``load_checkpoint``. ``model.load_report`` is a ``LoadReport``; it is logged before anything is read.

    Args:
        path: a local folder, or the name of a model on the hub, whose files transformers finds in its cache or
            downloads.
        group: ranks to distribute the experts over, see ``swap_moe``.
        model_class: an Auto class or a model class of transformers. None: ``AutoModelForCausalLM``, or the class in
            ``config.architectures`` if the configuration is of no causal language model.
        device: device of the parameters. None: the default device.
        tp_group: ranks that share the heads, linears and vocabulary, see ``swap_attention`` and ``swap_linears``.
        cp_group: ranks that share the sequence, see ``swap_attention``.
        as_transformers: of ``AutoModel.from_pretrained``: ``dtype``, ``attn_implementation``, ``config``,
            ``trust_remote_code``, ``revision``, ``subfolder``, ``cache_dir``, ``local_files_only``, ``token``, and
            settings of the configuration. Of ``swap_moe``: ``backend``, ``options``, ``overlap``, ``placement``,
            ``expert_gemm_dtype``. Of ``swap_attention``: ``context``. ``offload``: an ``ExpertOffload``, see
            ``offload_experts``; the experts are then never in memory together.

    Returns:
        The model, in evaluation mode.

    Raises:
        ConfigError: a setting is unknown or not supported, or ``path`` has no configuration or safetensors.
        UnsupportedModel: the checkpoint is quantized in another way than fp8 with scales per block, or ``swap_moe``
            does not support the model.
        InputError, CorruptFile, CheckpointError: see ``load_checkpoint``. All errors are raised on every rank.
    """
    require_transformers()
    ep, tp, cp = group_or_default(as_group(group, "ep")), as_group(tp_group, "tp"), as_group(cp_group, "cp")
    groups = [one for one in (ep, tp, cp) if one is not None and group_size(one) > 1]
    settings = {name: as_transformers.pop(name) for name in (*_SWAP, *_BUILD) if name in as_transformers}
    fault: Exception | None = None
    model: Any = None
    folder = Path(path)
    target = torch.get_default_device()
    try:
        target = _device(device, settings.pop("device_map", None))
        hub = {name: as_transformers.pop(name) for name in _HUB if name in as_transformers}
        model, folder = _build(path, model_class, settings, hub, as_transformers)
        initialize_buffers(model, target)
    except Exception as error:  # the other ranks wait
        fault = error
    agree_in(groups, fault, f"from_pretrained({path})")
    of_swap = {name: settings[name] for name in _SWAP if name in settings}
    steps = [partial(parallelize_moe, model, group, **of_swap)]
    if tp is not None or cp is not None:
        context = settings.get("context", "ulysses")
        steps.append(partial(parallelize_attention, model, tp, cp_group=cp, context=context))
    if tp is not None:
        steps.append(partial(parallelize_linears, model, tp))
    if settings.get("offload") is not None:
        steps.append(partial(offload_experts, model, settings["offload"]))
    for step in steps:
        try:
            with target:  # the device that the weights will be on
                step()
        except Exception as error:  # the ranks of other groups wait
            fault = error
        agree_in(groups, fault, f"from_pretrained({path})")
    model.load_report = load_checkpoint(model, folder, device=target)
    return model.eval()


def _device(device: torch.device | str | None, device_map: Any) -> torch.device:
    """Return the device of the parameters."""
    if isinstance(device_map, dict) and [*device_map] == [""]:
        device_map = device_map[""]
    if device_map is not None and (device is not None or not isinstance(device_map, torch.device | str | int)):
        raise ConfigError(f"each rank has one device: pass device instead of device_map = {device_map!r}")
    wanted = device if device_map is None else device_map
    try:
        chosen = torch.get_default_device() if wanted is None else torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be one device, such as 'cuda:0'; got {wanted!r}") from error
    if chosen.type == "meta":
        raise ConfigError("from_pretrained loads values, which device 'meta' does not have")
    return chosen


def _build(
    path: str | PathLike[str], model_class: Any, settings: dict[str, Any], hub: dict[str, Any], others: dict[str, Any]
) -> tuple[Any, Path]:
    """Return a model on "meta", and the folder with its weights.

    Args:
        settings: those in ``_BUILD``.
        hub: how to find files on the hub.
        others: further settings.
    """
    for name, value in list(others.items()):
        if name in _NO_EFFECT and value in _NO_EFFECT[name]:
            del others[name]
        elif name in _REFUSED or name in _NO_EFFECT:
            reason = _REFUSED.get(name, "only safetensors can be read, without another copy of the model")
            raise ConfigError(f"from_pretrained does not support {name}: {reason}")
    config = _config(path, settings, hub, others)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        if getattr(method, "value", method) != "fp8":
            raise UnsupportedModel(
                f"{path} is quantized ({getattr(method, 'value', method)}); from_pretrained dequantizes only fp8 with "
                "scales per block of 128 x 128 values. Dequantize it with transformers (model.dequantize(), or "
                "dequantize=True in the quantization_config), save it, and load the result"
            )
        del config.quantization_config  # the loaded model is not quantized
    folder = weights_folder(path, hub)
    dtype = _dtype(settings.get("dtype", settings.get("torch_dtype")), config, folder)
    attention = settings.get("attn_implementation")
    options: dict[str, Any] = {"dtype": dtype} | ({"attn_implementation": attention} if attention else {})
    with torch.device("meta"):
        model = _create(config, model_class, options, settings.get("trust_remote_code"))
    model.config.name_or_path = str(path)
    for pattern, kept in model._get_dtype_plan(dtype).items():  # parameters that stay in fp32
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)
    if model.can_generate():
        from transformers import GenerationConfig

        with suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(str(path), **hub)
    return model, folder


def _config(path: str | PathLike[str], settings: dict[str, Any], hub: dict[str, Any], others: dict[str, Any]) -> Any:
    """Return the configuration of the model, with the settings in ``others``."""
    from transformers import AutoConfig, PreTrainedConfig

    given = settings.get("config")
    if isinstance(given, PreTrainedConfig):
        unused, config = others, deepcopy(given)
    else:
        trusted = {"trust_remote_code": True} if settings.get("trust_remote_code") else {}
        auto: Any = AutoConfig
        source = str(path if given is None else given)
        try:
            config, unused = auto.from_pretrained(source, return_unused_kwargs=True, **hub, **trusted, **others)
        except (OSError, ValueError) as error:
            where = (
                "" if Path(source).exists() else ", which is neither a folder nor a model that the hub has provided,"
            )
            raise ConfigError(f"the configuration in {source}{where} cannot be read: {error}") from error
    unused = {name: value for name, value in unused.items() if name not in (*hub, "trust_remote_code")}
    if unused:
        name = next(iter(unused))
        raise ConfigError(f"unknown setting {name!r}{suggestion(name, (*_SWAP, *_HUB, *_BUILD, *config.to_dict()))}")
    return config


def _create(config: Any, model_class: Any, options: dict[str, Any], trust_remote_code: Any) -> Any:
    import transformers

    chosen = model_class or transformers.AutoModelForCausalLM
    remote = getattr(config, "auto_map", None) and trust_remote_code
    if model_class is None and not remote and type(config) not in chosen._model_mapping:
        names = config.architectures or ["none"]
        chosen = getattr(transformers, names[0], None)
        if chosen is None:
            raise UnsupportedModel(f"transformers has no class for the architecture {names[0]}; pass model_class")
    if hasattr(chosen, "from_config"):
        return chosen.from_config(config, **options, **({"trust_remote_code": True} if remote else {}))
    if not hasattr(chosen, "_from_config"):
        raise ConfigError(f"model_class must be an Auto class or a model class of transformers; got {chosen!r}")
    return chosen._from_config(config, **options)


def _dtype(dtype: Any, config: Any, folder: Path) -> torch.dtype:
    """Return the dtype of the parameters: by default that of the configuration, or of the checkpoint."""
    if dtype in (None, "auto") and (dtype := getattr(config, "dtype", None)) is None:
        files = HubFolder(folder)
        stored = (files.stored(name).dtype for name in files)
        dtype = DTYPES[next((one for one in stored if one in FLOATS), "F32")]
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(f"dtype must be 'auto' or a floating-point dtype of torch; got {dtype!r}")
    return dtype


def weights_folder(path: str | PathLike[str], hub: dict[str, Any]) -> Path:
    """Return the folder with the safetensors of a model."""
    if Path(path).exists():
        return Path(path, str(hub.get("subfolder", "")))
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    find: Callable[..., str | None] = cached_file
    try:
        file = find(str(path), SINGLE, _raise_exceptions_for_missing_entries=False, **hub)
        if file is None:
            file = find(str(path), INDEX, **hub)
            get_checkpoint_shard_files(str(path), file, **hub)
        return Path(str(file)).parent
    except OSError as error:
        raise ConfigError(f"the safetensors of {path} cannot be found: {error}") from error
