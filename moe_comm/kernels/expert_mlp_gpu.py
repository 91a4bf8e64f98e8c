"""``ExpertMLP`` on a GPU: one launch per GEMM for the rows of all experts (``kernels/triton/grouped_mm.py``).

    forward    h = rows @ w13.T          act = activation(h)         out = act @ w2.T       SwiGLU: h and act at once
    backward   grad_act = grad @ w2      grad_h, act again           grad_rows = grad_h @ w13
                                         grad_w2 = grad.T @ act      grad_w13 = grad_h.T @ rows

Each line is one or two launches for any number of experts. None of them copies the row counts to the CPU. If w13 or w2
is a parameter with an fp32 tensor ``main_grad``, its gradient is added there (``kernels/triton/grouped_mm.py``).
Gradients of experts with ``ExpertMLP.wide`` are written there.

Biases are added in the GEMMs. Their gradients are sums over the rows of an expert (``kernels/triton/biases.py``).

If experts multiply by the routing weights in backward (``expert_call.sends_weights``), ``grad`` is not multiplied by
them, and grad_h and act are, after the gradient of the weight of each row, ``<act, grad_act> + <b2, grad>``. These
are the formula and the bits of ``expert_mlp.MLPBackward``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_comm.gpu.gemm import TakenRows
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.native import for_triton
from moe_comm.kernels.row_weights import RowWeights, scale_

if TYPE_CHECKING:
    from moe_comm.kernels.triton.program import Program

DTYPES = (torch.bfloat16, torch.float16)
"""fp32 uses cuBLAS, expert by expert, because these kernels multiply it without tensor cores."""
MIN_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with bf16 tensor cores."""


def takes(mlp: ExpertMLP, rows_RD: Tensor) -> bool:
    """Return whether the kernels support these experts: 16-bit, without adapters."""
    if type(mlp) is not ExpertMLP:
        return False
    w13_EGD, w2_EDF, *biases = mlp.tensors
    if rows_RD.dtype not in DTYPES or mlp.others:
        return False
    if any(bias is not None and bias.stride(1) != 1 for bias in biases):
        return False
    return w13_EGD.shape[0] > 0 and for_triton(rows_RD, w13_EGD, w2_EDF, *biases) and _has_tensor_cores(rows_RD.device)


@lru_cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Return whether the device can run the kernels; on the CPU they are interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


FirstProduct = Callable[[Tensor, Tensor, Tensor], None]
"""Multiplies rows by w13, or gradients by w2, into its last argument, with the bits of ``grouped_mm_into``."""
Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of w13, w2, b13 and b2."""
FirstSwiGLU = Callable[[Tensor, Tensor, Tensor, Tensor], bool]
"""The same for w13 with its activation (``Activation.glu``), into the last argument. False: nothing is computed."""
LastProduct = Callable[[Tensor, Tensor], None]
"""Multiplies rows by w2, or gradients by w13, and returns the results to where they are used."""


def forward(mlp: ExpertMLP, rows_RD: Tensor, counts_E: Tensor, out_RD: Tensor) -> Tensor:
    """Write the experts' output into ``out_RD``. Returns h_RG, for ``backward``.

    Args:
        rows_RD: [R, D], unit stride along D.
        counts_E: int64 rows of each expert, on the device. Rows of ``out_RD`` beyond their sum are not written.
    """
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into, grouped_mm_swiglu_into  # needs Triton

    w13_EGD, w2_EDF, b13_EG, b2_ED = mlp.tensors
    if (glu := mlp.activation.glu) is not None:
        h_RG = rows_RD.new_empty(rows_RD.shape[0], w13_EGD.shape[1])
        act_RF = rows_RD.new_empty(rows_RD.shape[0], w2_EDF.shape[2])
        grouped_mm_swiglu_into(rows_RD, w13_EGD, counts_E, h_RG, act_RF, b13_EG, glu=glu)
    else:
        h_RG, act_RF, _ = hidden(mlp, rows_RD, lambda x, w, out: grouped_mm_into(x, w, counts_E, out, bias_EN=b13_EG))
    grouped_mm_into(act_RF, w2_EDF, counts_E, out_RD, bias_EN=b2_ED)
    return h_RG


def forward_taken(mlp: ExpertMLP, rows: TakenRows, counts_E: Tensor, out_RD: Tensor) -> Tensor | None:
    """Run ``forward`` on tokens that are not copied, if a kernel does it. Otherwise return None: copy them."""
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into, taken_mm_swiglu_into  # needs Triton

    w13_EGD, w2_EDF, _, _ = mlp.tensors
    if (glu := mlp.activation.glu) is None:
        return None
    h_RG = out_RD.new_empty(out_RD.shape[0], w13_EGD.shape[1])
    act_RF = out_RD.new_empty(out_RD.shape[0], w2_EDF.shape[2])
    if not taken_mm_swiglu_into(rows, w13_EGD, counts_E, h_RG, act_RF, glu=glu):
        return None
    grouped_mm_into(act_RF, w2_EDF, counts_E, out_RD)
    return h_RG


def hidden(
    mlp: ExpertMLP, rows_RD: Tensor, first: FirstProduct, swiglu: FirstSwiGLU | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h_RG, the activations [R, F], and w2, which they are multiplied by."""
    w13_EGD, w2_EDF, _, _ = mlp.tensors
    h_RG = rows_RD.new_empty(rows_RD.shape[0], w13_EGD.shape[1])
    act_RF = rows_RD.new_empty(rows_RD.shape[0], w2_EDF.shape[2])
    if swiglu is not None and mlp.activation.glu is not None and swiglu(rows_RD, w13_EGD, h_RG, act_RF):
        return h_RG, act_RF, w2_EDF
    first(rows_RD, w13_EGD, h_RG)
    mlp.activation.forward(h_RG, act_RF)
    return h_RG, act_RF, w2_EDF


def backward(
    mlp: ExpertMLP,
    rows_RD: Tensor,
    h_RG: Tensor | None,
    grad_RD: Tensor,
    counts_E: Tensor,
    grad_rows_RD: Tensor | None,
    needs: Sequence[bool],
    weights: RowWeights | None = None,
) -> Grads:
    """Write the gradient of the rows into ``grad_rows_RD`` if it is not None. Return the gradients of the tensors.

    Args:
        h_RG: The result of ``forward``; None: it is recomputed.
        needs: whether each of ``mlp.tensors`` needs a gradient. If not, None is returned.
        weights: by which the experts multiply; None if ``grad_RD`` is multiplied already.

    Returns:
        The gradients, those of weights as ``weight_grad`` returns them.
    """
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into  # needs Triton

    last = None if grad_rows_RD is None else lambda rows, w: grouped_mm_into(rows, w, counts_E, grad_rows_RD)
    return backward_by(mlp, rows_RD, h_RG, grad_RD, counts_E, needs, (None, last), weights)


@lru_cache(maxsize=1)
def _programs() -> tuple[Program, Program]:
    from moe_comm.kernels.triton.program import Program  # needs Triton

    return Program(_forward), Program(_backward)


def _forward(
    rows_RD: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None, b2: Tensor | None, counts_E: Tensor, out_RD: Tensor,
    activation: Activation,
) -> tuple[Tensor]:  # fmt: skip
    return (forward(ExpertMLP((w13, w2, b13, b2), activation), rows_RD, counts_E, out_RD),)


def repeated_forward(mlp: ExpertMLP, rows_RD: Tensor, counts_E: Tensor, out_RD: Tensor) -> Tensor:
    """Run ``forward`` as a program, for a number of rows that calls repeat."""
    (h_RG,) = _programs()[0](3, (rows_RD, *mlp.tensors, counts_E, out_RD), mlp.activation)
    return h_RG  # type: ignore[no-any-return]


def _backward(
    grad_RD: Tensor, rows_RD: Tensor, h_RG: Tensor | None, counts_E: Tensor, w13: Tensor, w2: Tensor,
    b13: Tensor | None, b2: Tensor | None, grad_rows_RD: Tensor | None, weights_R: Tensor | None,
    dots_R: Tensor | None, activation: Activation, needs: tuple[bool, ...],
) -> Grads:  # fmt: skip
    weights = None if weights_R is None else RowWeights(weights_R, None, dots_R)
    mlp = ExpertMLP((w13, w2, b13, b2), activation)
    return backward(mlp, rows_RD, h_RG, grad_RD, counts_E, grad_rows_RD, needs, weights)


def repeated_backward(
    mlp: ExpertMLP,
    rows_RD: Tensor,
    h_RG: Tensor | None,
    grad_RD: Tensor,
    counts_E: Tensor,
    grad_rows_RD: Tensor | None,
    needs: Sequence[bool],
    weights: RowWeights | None,
) -> Grads:
    """Run ``backward`` as a program, for a number of rows that calls repeat."""
    w13, w2, _, b2 = mlp.tensors
    needs_w13, needs_w2, *_ = needs
    if mlp.wide or (needs_w13 and hasattr(w13, "main_grad")) or (needs_w2 and hasattr(w2, "main_grad")):
        return backward(mlp, rows_RD, h_RG, grad_RD, counts_E, grad_rows_RD, needs, weights)
    weights_R, dots_R = (None, None) if weights is None else (weights.weights_N, weights.dots_N)
    launched = 2 + (h_RG is None) + (grad_rows_RD is not None) + sum(needs) + (dots_R is not None and b2 is not None)
    inputs = grad_RD, rows_RD, h_RG, counts_E, *mlp.tensors, grad_rows_RD, weights_R, dots_R
    return _programs()[1](launched, inputs, mlp.activation, tuple(needs))


def backward_by(
    mlp: ExpertMLP,
    rows_RD: Tensor,
    h_RG: Tensor | None,
    grad_RD: Tensor,
    counts_E: Tensor,
    needs: Sequence[bool],
    products: tuple[FirstProduct | None, LastProduct | None],
    weights: RowWeights | None = None,
) -> Grads:
    """Run ``backward`` with these products of ``grad_RD`` and of the gradient of h. The second one is None if the rows
    need no gradient; the first one is then used only if w13 or routing weights do, and is None for ``grouped_mm_into``.
    Weight gradients are computed last."""
    from moe_comm.kernels.triton.biases import add_bias_dots, bias_grad
    from moe_comm.kernels.triton.grouped_mm import (
        grouped_mm_into,  # needs Triton
        weight_grad,
    )

    (w13_EGD, w2_EDF, b13_EG, b2_ED), (first, last) = mlp.tensors, products
    needs_w13, needs_w2, needs_b13, needs_b2 = (*needs, False, False)[:4]
    grad_w13 = grad_w2 = grad_b13 = grad_b2 = None
    out_w13, out_w2, out_b13, out_b2 = mlp.new_gradients(needs) if mlp.wide is not None else (None,) * 4
    if h_RG is None:
        h_RG = rows_RD.new_empty(rows_RD.shape[0], w13_EGD.shape[1])
        grouped_mm_into(rows_RD, w13_EGD, counts_E, h_RG, bias_EN=b13_EG)
    act_RF = rows_RD.new_empty(rows_RD.shape[0], w2_EDF.shape[2])
    needs_dots = weights is not None and weights.dots_N is not None
    grad_h_RG = torch.empty_like(h_RG) if last is not None or needs_w13 or needs_b13 or needs_dots else None
    if grad_h_RG is not None:
        if first is None:
            gradient_of_h(mlp, grad_RD, counts_E, h_RG, grad_h_RG, act_RF, weights)
        else:
            first(grad_RD, w2_EDF.transpose(1, 2), act_RF)
            activation_backward(mlp.activation, h_RG, act_RF, grad_h_RG, weights)
        if weights is not None and needs_dots and b2_ED is not None:
            add_bias_dots(weights, grad_RD, b2_ED, counts_E)
        if last is not None:
            last(grad_h_RG, w13_EGD.transpose(1, 2))
    elif needs_w2:
        weighted_activation(mlp.activation, h_RG, act_RF, weights)
    if needs_w2:
        grad_w2 = weight_grad(w2_EDF, grad_RD, act_RF, counts_E, out_w2)
    if needs_b2 and b2_ED is not None:
        weights_R = None if weights is None else _of_rows(weights, grad_RD.shape[0])
        of_slice_RD = grad_RD if mlp.b2_columns is None else grad_RD[:, mlp.b2_columns]
        grad_b2 = bias_grad(b2_ED, of_slice_RD, counts_E, weights_R, out_b2)
    if grad_h_RG is not None and needs_w13:
        grad_w13 = weight_grad(w13_EGD, grad_h_RG, rows_RD, counts_E, out_w13)
    if grad_h_RG is not None and needs_b13 and b13_EG is not None:
        grad_b13 = bias_grad(b13_EG, grad_h_RG, counts_E, out_EN=out_b13)
    return grad_w13, grad_w2, grad_b13, grad_b2


def gradient_of_h(
    mlp: ExpertMLP,
    grad_RD: Tensor,
    counts_E: Tensor,
    h_RG: Tensor,
    grad_h_RG: Tensor,
    act_RF: Tensor,
    weights: RowWeights | None,
) -> None:
    """Multiply gradients by w2, and write the gradient of ``h_RG`` and the activation."""
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into  # needs Triton
    from moe_comm.kernels.triton.swiglu_gradient import swiglu_gradient_into

    w2_EDF = mlp.tensors[1]
    if (glu := mlp.activation.glu) is not None:
        swiglu_gradient_into(grad_RD, w2_EDF, counts_E, h_RG, grad_h_RG, act_RF, weights, glu=glu)
    else:
        grouped_mm_into(grad_RD, w2_EDF.transpose(1, 2), counts_E, act_RF)
        activation_backward(mlp.activation, h_RG, act_RF, grad_h_RG, weights)


def activation_backward(
    activation: Activation, h_RG: Tensor, grad_act_RF: Tensor, grad_h_RG: Tensor, weights: RowWeights | None
) -> None:
    """Write the gradient of ``h_RG``, and the activation into ``grad_act_RF``, which has its gradient."""
    if weights is None:
        # The gradient is read before the activation overwrites it.
        activation.backward(h_RG, grad_act_RF, grad_h_RG, grad_act_RF)
    elif (glu := activation.glu) is not None:
        from moe_comm.kernels.triton.swiglu import swiglu_backward_weighted  # needs Triton

        swiglu_backward_weighted(h_RG, grad_act_RF, grad_h_RG, grad_act_RF, weights, glu)
    else:
        act_RF = torch.empty_like(grad_act_RF)
        activation.backward(h_RG, grad_act_RF, grad_h_RG, act_RF)
        weights_R = _of_rows(weights, h_RG.shape[0])
        dots_R = scale_(act_RF, weights_R, None if weights.dots_N is None else grad_act_RF)
        scale_(grad_h_RG, weights_R)
        grad_act_RF.copy_(act_RF)
        if weights.dots_N is not None:
            assert dots_R is not None
            weights.dots_N.copy_(_of_slots(dots_R, weights).view_as(weights.dots_N))


def weighted_activation(activation: Activation, h_RG: Tensor, act_RF: Tensor, weights: RowWeights | None) -> None:
    """Write the activation, times the weights of the rows if there are any."""
    activation.forward(h_RG, act_RF)
    if weights is not None:
        scale_(act_RF, _of_rows(weights, h_RG.shape[0]))


def _of_rows(weights: RowWeights, num_rows: int) -> Tensor:
    """Return [R], the weight of each row."""
    weights_N, place_N, _, _ = weights
    if place_N is None:
        return weights_N.view(-1)
    from moe_comm.kernels.triton.rows import copy_rows  # needs Triton

    return copy_rows(weights_N.view(-1, 1), place_N.view(-1, 1), num_rows).view(-1)


def _of_slots(dots_R: Tensor, weights: RowWeights) -> Tensor:
    """Return [N], the value of each slot's row, 0 without one."""
    if weights.place_N is None:
        return dots_R
    from moe_comm.kernels.triton.rows import weighted_sum  # needs Triton

    return weighted_sum(dots_R.view(-1, 1), weights.place_N.view(-1, 1), None).view(-1)


def backward_in_one_buffer(
    mlp: ExpertMLP,
    h_RG: Tensor | None,
    grad_RD: Tensor,
    counts_E: Tensor,
    needs: Sequence[bool],
    moves: tuple[Callable[[Tensor | None], Tensor], Callable[[Tensor], Tensor]],
    weights: RowWeights | None,
) -> tuple[Tensor | None, Grads]:
    """Run ``backward`` for rows that are copied again, with one buffer for all rows of width D: that of ``grad_RD``.

    Args:
        grad_RD: as in ``backward``; overwritten.
        needs: whether the rows, w13, w2, b13 and b2 need gradients.
        moves: the first one writes the rows into a buffer, or returns new ones for None. The second one returns what is
            needed of the gradient of the rows, whose memory is then overwritten.

    Returns:
        The result of the second one of ``moves``, and the gradients of the tensors.
    """
    from moe_comm.kernels.triton.biases import add_bias_dots, bias_grad
    from moe_comm.kernels.triton.grouped_mm import grouped_mm_into, weight_grad  # needs Triton

    w13_EGD, w2_EDF, b13_EG, b2_ED = mlp.tensors
    (needs_rows, needs_w13, needs_w2, needs_b13, needs_b2), (rows_into, sum_rows) = needs, moves
    summed = grad_w13 = grad_w2 = grad_b13 = grad_b2 = None
    out_w13, out_w2, out_b13, out_b2 = mlp.new_gradients(needs[1:]) if mlp.wide is not None else (None,) * 4
    shape = grad_RD.shape[0], w13_EGD.shape[1]
    needs_dots = weights is not None and weights.dots_N is not None
    grad_h_RG = grad_RD.new_empty(shape) if needs_rows or needs_w13 or needs_b13 or needs_dots else None
    if h_RG is None:
        # A recorded program keeps all buffers at once, so the rows are copied into the memory of the gradient of h.
        fits = grad_h_RG is not None and grad_h_RG.numel() >= grad_RD.numel()
        to_RD = grad_h_RG.view(-1)[: grad_RD.numel()].view(grad_RD.shape) if fits else None  # type: ignore[union-attr]
        h_RG = grad_RD.new_empty(shape)
        grouped_mm_into(rows_into(to_RD), w13_EGD, counts_E, h_RG, bias_EN=b13_EG)
    act_RF = grad_RD.new_empty(grad_RD.shape[0], w2_EDF.shape[2])
    if grad_h_RG is not None:
        gradient_of_h(mlp, grad_RD, counts_E, h_RG, grad_h_RG, act_RF, weights)
        if weights is not None and needs_dots and b2_ED is not None:
            add_bias_dots(weights, grad_RD, b2_ED, counts_E)
    elif needs_w2:
        weighted_activation(mlp.activation, h_RG, act_RF, weights)
    if needs_w2:
        grad_w2 = weight_grad(w2_EDF, grad_RD, act_RF, counts_E, out_w2)
    if needs_b2 and b2_ED is not None:
        weights_R = None if weights is None else _of_rows(weights, grad_RD.shape[0])
        grad_b2 = bias_grad(b2_ED, grad_RD, counts_E, weights_R, out_b2)
    if grad_h_RG is not None and needs_b13 and b13_EG is not None:
        grad_b13 = bias_grad(b13_EG, grad_h_RG, counts_E, out_EN=out_b13)
    if grad_h_RG is not None and needs_rows:
        grouped_mm_into(grad_h_RG, w13_EGD.transpose(1, 2), counts_E, grad_RD)
        summed = sum_rows(grad_RD)
    if grad_h_RG is not None and needs_w13:
        grad_w13 = weight_grad(w13_EGD, grad_h_RG, rows_into(grad_RD), counts_E, out_w13)
    return summed, (grad_w13, grad_w2, grad_b13, grad_b2)
