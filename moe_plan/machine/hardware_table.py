"""Named accelerators and clusters: SXM or OAM parts unless stated otherwise, with dense rates.

Peaks are from data sheets. Memory is what the driver reports. Efficiencies are from published measurements, at most one
of each table, and hold for every shape: ``Accelerator.gemm_seconds`` computes the losses of a shape. "Assumed" marks
numbers without a source. ``moe_plan.machine.hardware_file`` reads descriptions of other machines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moe_comm.errors import ConfigError
from moe_plan.machine.collectives import Link
from moe_plan.machine.fused import GROUPED
from moe_plan.machine.hardware import Accelerator, Cluster, GemmTile
from moe_plan.machine.hardware_file import load

MIB = 2**20
THIS_MACHINE = "this-machine"

# Tiles of library kernels. The efficiency of small tiles follows from the operands that they load per operation,
# (rows + columns) / (rows x columns), as CUTLASS' profiler shows it on Hopper; assumed for other architectures.
TILES = (GemmTile(256, 128), GemmTile(128, 128, 0.9), GemmTile(128, 64, 0.75), GemmTile(64, 64, 0.55))

# Rate of GEMMs and attention in a step, relative to the best rate. Fitted on one row of MoE Parallel Folding's table 3
# (arXiv 2504.14960): MCore, Mixtral 8x22B on 128 H100. Assumed wherever power limits the clocks. It also predicts
# steps of dense models on A100 and H100, which were not fitted (published/llm-foundry-a100, nemo-dense).
SUSTAINED = 0.827

# NVIDIA A100 data sheet: 312 TFLOP/s bf16, 19.5 fp32, 2,039 GB/s (80 GB), 108 SMs. Efficiency: cuBLAS' best products
# reach about 270 TFLOP/s (assumed). Attention: FlashAttention-2 (arXiv 2307.08691), 225 TFLOP/s forward at best and
# 170 to 196 backward, less at 4k.
A100 = Accelerator(
    "a100",
    flops={"fp32": 19.5e12, "bf16": 312e12},
    efficiency={"fp32": 0.9, "bf16": 0.87},
    memory_bytes=81_920 * MIB,
    memory_bytes_per_s=2.039e12,
    units=108,
    tiles=TILES,
    attention_forward=0.65,
    attention_backward=0.52,
    sustained=SUSTAINED,
)
# NVIDIA H100 data sheet: 989.4 TFLOP/s bf16, 1,978.9 fp8, 67 fp32, 3.35 TB/s, 132 SMs. Efficiency in bf16: fitted on
# one row of ParallelKittens' table 3 (arXiv 2511.13940), M = N = 32768, K = 8192: 23.285 ms. In fp8: 1,280 TFLOP/s at
# best (SemiAnalysis, MI300X vs H100 vs H200, December 2024). fill_k: about 1.1 us of a unit's rate, 0.7 us until the
# first operands arrive from memory (assumed). Attention: FlashAttention-3 (arXiv 2407.08608), causal, heads of 128,
# 4k to 8k: about 600 TFLOP/s forward, 475 backward.
H100 = Accelerator(
    "h100",
    flops={"fp32": 67e12, "bf16": 989.4e12, "fp8": 1978.9e12},
    efficiency={"fp32": 0.8, "bf16": 0.775, "fp8": 0.66},
    memory_bytes=81_559 * MIB,
    memory_bytes_per_s=3.35e12,
    units=132,
    tiles=TILES,
    fill_k=96,
    attention_forward=0.6,
    attention_backward=0.48,
    sustained=SUSTAINED,
)
# NVIDIA H200 data sheet: the H100's rates, 141 GB at 4.8 TB/s.
H200 = replace(H100, name="h200", memory_bytes=143_771 * MIB, memory_bytes_per_s=4.8e12)
# H800: an H100 with less NVLink (DeepSeek-V3, arXiv 2412.19437 and 2505.09343). Rate of experts with unequal numbers of
# rows: that of Flux' kernels (``fused.GROUPED``). No measurement exists for other accelerators, which keep rate 1.
H800 = replace(H100, name="h800", grouped=GROUPED)
# NVIDIA H20: 148 TFLOP/s bf16, 296 fp8, 44 fp32, 4.0 TB/s, 78 SMs (product brief as reported at its launch). GEMMs and
# attention are close to the peak, because compute is low relative to memory bandwidth and power (assumed).
H20 = Accelerator(
    "h20",
    flops={"fp32": 44e12, "bf16": 148e12, "fp8": 296e12},
    efficiency={"fp32": 0.9, "bf16": 0.93, "fp8": 0.9},
    memory_bytes=97_871 * MIB,
    memory_bytes_per_s=4.0e12,
    units=78,
    tiles=TILES,
    attention_forward=0.85,
    attention_backward=0.7,
)
# NVIDIA HGX B200 data sheet, one of eight: 2.25 PFLOP/s bf16, 4.5 fp8, 75 TFLOP/s fp32, 7.7 TB/s; 148 SMs. Efficiency:
# cuBLAS' 1,610 TFLOP/s at M = N = K = 8192 (tutorial of NVIDIA's Tilus). Fp8 and attention: assumed, in the H100's
# proportion.
B200 = Accelerator(
    "b200",
    flops={"fp32": 75e12, "bf16": 2250e12, "fp8": 4500e12},
    efficiency={"fp32": 0.8, "bf16": 0.73, "fp8": 0.64},
    memory_bytes=183_359 * MIB,
    memory_bytes_per_s=7.7e12,
    units=148,
    tiles=TILES,
    attention_forward=0.6,
    attention_backward=0.45,
    sustained=SUSTAINED,
)
# AMD Instinct MI300X data sheet: 1,307.4 TFLOP/s bf16, 2,614.9 fp8, 163.4 fp32, 5.3 TB/s, 192 GB, 304 CUs. Efficiency:
# 620 TFLOP/s bf16 and 990 fp8 at best (SemiAnalysis, December 2024). Attention: assumed.
MI300X = Accelerator(
    "mi300x",
    flops={"fp32": 163.4e12, "bf16": 1307.4e12, "fp8": 2614.9e12},
    efficiency={"fp32": 0.6, "bf16": 0.48, "fp8": 0.38},
    memory_bytes=196_592 * MIB,
    memory_bytes_per_s=5.3e12,
    units=304,
    tiles=TILES,
    memory_reach=0.8,
    attention_forward=0.35,
    attention_backward=0.25,
    sustained=SUSTAINED,
)
# NVIDIA L20, PCIe: 119.5 TFLOP/s bf16, 239 fp8, 59.8 fp32, 864 GB/s, 48 GB, 92 SMs. Efficiency: cuBLAS' 105 to 115
# TFLOP/s. Fp8 and attention: assumed.
L20 = Accelerator(
    "l20",
    flops={"fp32": 59.8e12, "bf16": 119.5e12, "fp8": 239e12},
    efficiency={"fp32": 0.85, "bf16": 0.95, "fp8": 0.9},
    memory_bytes=46_068 * MIB,
    memory_bytes_per_s=864e9,
    units=92,
    tiles=TILES,
    attention_forward=0.75,
    attention_backward=0.6,
)
# NVIDIA L40S data sheet, PCIe: 362 TFLOP/s bf16 without sparsity, 733 fp8, 91.6 fp32, 864 GB/s, 48 GB, 142 SMs.
# Efficiency and attention: assumed, in proportion to an L20, which has the same bandwidth.
L40S = replace(
    L20,
    name="l40s",
    flops={"fp32": 91.6e12, "bf16": 362e12, "fp8": 733e12},
    efficiency={"fp32": 0.8, "bf16": 0.75, "fp8": 0.7},
    units=142,
)

# Latency of a hop: NCCL's for LL128, src/graph/tuning.cc: 1.9 us over NVLink, 2.5 us over PCIe, 4.0 us over a network.
# NVLink: half of the data sheets' figures, which count both directions. Reach: 360 GB/s "is exactly what we'd expect on
# H100" (NVIDIA/nccl-tests issue 326); NCCL's limit of 235 GB/s for the A100 (tuning.cc); 158 GB/s on the H800 (DeepEP).
NVLINK_A100 = Link("NVLink 3", 300e9, 1.9e-6, 0.78)
NVLINK_H100 = Link("NVLink 4", 450e9, 1.9e-6, 0.8)
NVLINK_H800 = Link("NVLink 4, 8 lanes", 200e9, 1.9e-6, 0.79)
NVLINK_B200 = Link("NVLink 5", 900e9, 1.9e-6, 0.8)  # reach: assumed to be the H100's
# Seven links of 64 GB/s in one direction, one to each other accelerator (data sheet). Reach and latency: assumed.
XGMI_MI300X = Link("Infinity Fabric", 448e9, 3e-6, 0.7)
# PCIe 4.0 x16 through two CPUs. Reach: fitted on one row of Flux' docs/performance.md, all-gather of 4096 x 12288 fp16
# on eight L20: 11.2 ms, with a GEMM of 5.746 ms. One-sided: fitted on one row of its MoE tables, layer 0 on L20 with 8
# experts, top 2, TP 8: 5.901 ms, in which all tokens are received.
PCIE_4 = Link("PCIe 4.0 x16", 32e9, 2.5e-6, 0.25, 0.83)
# Reach: 340 GB/s of 400 on 32 hosts with eight NICs (NVIDIA/nccl issue 1218), up to 390 GB/s on few hosts.
IB_400 = Link("InfiniBand 400 Gb/s", 50e9, 4e-6, 0.9)
IB_200 = Link("InfiniBand 200 Gb/s", 25e9, 4e-6, 0.9)
IB_200_SHARED = Link("InfiniBand 200 Gb/s for four", 6.25e9, 4e-6, 0.9)


@dataclass(frozen=True)
class MachineSpec:
    """An accelerator with its usual links and number per host."""

    accelerator: Accelerator
    inside: Link
    between: Link
    host_size: int = 8


MACHINES = {
    machine.accelerator.name: machine
    for machine in (
        MachineSpec(A100, NVLINK_A100, IB_200),  # DGX A100: eight HDR NICs for compute
        MachineSpec(H100, NVLINK_H100, IB_400),  # DGX H100
        MachineSpec(H200, NVLINK_H100, IB_400),
        MachineSpec(H800, NVLINK_H800, IB_400),  # DeepSeek-V3
        MachineSpec(H20, NVLINK_H100, IB_400),
        MachineSpec(B200, NVLINK_B200, IB_400),  # DGX B200
        MachineSpec(MI300X, XGMI_MI300X, IB_400),
        MachineSpec(L20, PCIE_4, IB_200_SHARED),  # NICs: assumed
        MachineSpec(L40S, PCIE_4, IB_200),  # NICs: assumed
    )
}


def cluster_named(text: str, gpus: int | None = None, host_size: int | None = None) -> Cluster:
    """Return a cluster of ``gpus`` accelerators.

    Args:
        text: the name of an accelerator (``h100``), or the path of a hardware description.
        gpus, host_size: None: those of the file, or for a named accelerator one host of the usual size. They cannot
            change the size of a file with pods.

    Raises:
        ConfigError: the name is unknown, or the file is invalid (``hardware_file.load``).
    """
    machine = MACHINES.get(text.lower())
    if machine is not None:
        size = host_size or machine.host_size
        return Cluster(machine.accelerator, size if gpus is None else gpus, size, machine.inside, machine.between)
    path = Path(text)
    if path.suffix != ".json" and not path.is_file():
        measured = "; --calibrate writes the description of this machine" if text == THIS_MACHINE else ""
        raise ConfigError(
            f"unknown hardware {text!r}: expected {', '.join(MACHINES)}, or the path of a .json description{measured}"
        )
    cluster = load(path)
    requested = (cluster.gpus if gpus is None else gpus, host_size or cluster.host_size)
    if requested == (cluster.gpus, cluster.host_size):
        return cluster
    if cluster.pods:
        raise ConfigError(
            f"{text}: describes pods of {cluster.gpus} accelerators, {cluster.host_size} per host, which cannot be "
            f"changed to {requested[0]}, {requested[1]} per host; edit the file"
        )
    return replace(cluster, gpus=requested[0], host_size=requested[1])
