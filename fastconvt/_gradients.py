"""The backward operators where no kernels of our own make the gradients: through ATen, and composed for the chain."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastconvt._precision import aten_convolutions
from fastconvt._shapes import Call, dense_strides, output_layout

_HALVES = (torch.float16, torch.bfloat16)
_CHUNK_BYTES = 48 * 2**20  # of one temporary of the fused chain's backward; four or five live at a time


def gradient_strides(input: Tensor, weight: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The strides of the gradients: the input's follow the layout rule of outputs, the weight's the weight itself.

    A weight that is not dense has the gradient that ``torch.empty_like`` makes of it.
    """
    spatial = weight.dim() - 2
    like = torch.empty_like(weight, device="meta", memory_format=torch.preserve_format)
    return dense_strides(input.shape, spatial, output_layout(input, weight)), like.stride(), (1,)


def conv_transpose_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, call: Call, mask: Sequence[bool], allow_tf32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that ``mask`` asks for, of a checked call; an empty tensor for each of the others.

    Halves on the CPU are computed in float32 and rounded once.
    """
    computed = _aten_gradients(grad_output, input, weight, call, mask, allow_tf32)
    strides = gradient_strides(input, weight)
    return tuple(_as(tensor, input, stride) for tensor, stride in zip(computed, strides, strict=True))


def _aten_gradients(
    grad_output: Tensor, input: Tensor, weight: Tensor, call: Call, mask: Sequence[bool], allow_tf32: bool
) -> list[Tensor | None]:
    """What ATen computes, in its own layouts, and in float32 for halves on the CPU; None for what is not asked."""
    channels = weight.shape[1] * call.groups
    if not any(mask):
        return [None, None, None]
    if input.numel() == 0:
        shapes = (input.shape, weight.shape, (channels,))
        return [input.new_zeros(shape) if asked else None for shape, asked in zip(shapes, mask, strict=True)]
    batched = input.dim() == weight.dim()
    tensors = [grad_output, input] if batched else [grad_output.unsqueeze(0), input.unsqueeze(0)]
    tensors.append(weight)
    on_cpu = input.device.type == "cpu"
    if on_cpu and input.dtype in _HALVES:
        tensors = [tensor.float() for tensor in tensors]
    if on_cpu and channels == 1:
        # With one output channel in channels_last oneDNN's gradient of the input reads unwritten memory (torch 2.14).
        # Flattening settles the strides of dimensions of size 1, by which ATen would still take a tensor for one.
        tensors = [tensor.contiguous().flatten().view(tensor.shape) for tensor in tensors]
    # On the CPU the bias's is summed here: oneDNN adds one number after the other, sum() does so pairwise.
    from_aten = [mask[0], mask[1], mask[2] and not on_cpu]
    onednn = not (mask[1] and _breaks_onednn(weight, call))
    with aten_convolutions(input.device, allow_tf32, onednn):
        computed = torch.ops.aten.convolution_backward(
            *tensors,
            [channels],
            call.stride,
            call.padding,
            call.dilation,
            True,
            call.output_padding,
            call.groups,
            from_aten,
        )
    gradients = [gradient if asked else None for gradient, asked in zip(computed, from_aten, strict=True)]
    if mask[2] and on_cpu:
        gradients[2] = tensors[0].sum((0, *range(2, weight.dim())))
    if mask[0] and not batched:
        gradients[0] = gradients[0].squeeze(0)
    return gradients


def _breaks_onednn(weight: Tensor, call: Call) -> bool:
    """Whether oneDNN's gradient of the weight could be wrong, or read and write out of bounds, as of torch 2.14.

    Seen where the padding of an axis exceeds half of the kernel's extent, so that taps lie in the padding alone, and in
    3D also where the depth's padding exceeds its stride and the kernel and the stride exceed the output. The test is
    wider; layers of that kind are rare or small, and losing oneDNN costs them little.
    """
    axes = zip(call.padding, call.dilation, weight.shape[2:], strict=True)
    extents = [(padding, dilation * (kernel - 1) + 1) for padding, dilation, kernel in axes]
    if any(2 * padding > extent for padding, extent in extents):
        return True
    padding, extent = extents[0]
    return weight.dim() == 5 and padding > call.stride[0] and call.shape[-3] < 2 * (extent + call.stride[0])


def _as(tensor: Tensor | None, input: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``tensor`` with the dtype of ``input`` and these strides, copied where needed; an empty one in place of None."""
    if tensor is None:
        return input.new_empty(0)
    if tensor.dtype == input.dtype and tensor.stride() == strides:
        return tensor
    return input.new_empty_strided(tensor.shape, strides).copy_(tensor)


def chain_backward(
    grad_output: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor],
    call: Call,
    mask: Sequence[bool],
    min: float,
    max: float,
    allow_tf32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of conv_transpose3d_logsumexp_hardswish with respect to ``tensors``, of a checked call.

    The convolution is recomputed a chunk of the batch at a time, in float32 for halves, so that its full output never
    exists; the gradients of weight, bias and subtrahend are summed in that precision and rounded once.
    """
    input, weight, bias, subtrahend = tensors
    precision = torch.float32 if input.dtype in _HALVES else input.dtype
    batched = input.dim() == weight.dim()
    batch = input if batched else input.unsqueeze(0)
    grads = grad_output if batched else grad_output.unsqueeze(0)
    wide_weight, wide_subtrahend = weight.to(precision), subtrahend.to(precision).reshape(())
    wide_bias = None if bias is None else bias.to(precision)

    channels = weight.shape[1] * call.groups
    strides = gradient_strides(input, weight)
    grad_input = input.new_empty_strided(input.shape, strides[0]) if mask[0] else input.new_empty(0)
    grad_batch = grad_input if batched or not mask[0] else grad_input.unsqueeze(0)
    sums = [torch.zeros_like(wide_weight), wide_weight.new_zeros(channels)]
    grad_subtrahend = wide_weight.new_zeros(())
    out_positions = grads.shape[2:].numel()
    chunk = _CHUNK_BYTES // (channels * out_positions * wide_weight.element_size()) or 1
    # TF32 represents every float16 and bfloat16 exactly, and they are no more precise than it.
    allow_tf32 = allow_tf32 or input.dtype in _HALVES
    for begin in range(0, batch.shape[0], chunk):
        part = slice(begin, begin + chunk)
        x = batch[part].to(precision)
        u = torch.ops.fastconvt.conv_transpose3d(
            x,
            wide_weight,
            wide_bias,
            call.stride,
            call.padding,
            call.output_padding,
            call.groups,
            call.dilation,
            allow_tf32=allow_tf32,
        )
        du, d_subtrahend = _tail_backward(grads[part].to(precision), u, wide_subtrahend, min, max)
        grad_subtrahend += d_subtrahend
        if not any(mask[:3]):
            continue
        d_input, d_weight, d_bias = _aten_gradients(du, x, wide_weight, call, mask[:3], allow_tf32)
        if mask[0]:
            grad_batch[part].copy_(d_input)
        for total, summand in zip(sums, (d_weight, d_bias), strict=True):
            if summand is not None:
                total += summand
    grad_weight, grad_bias = (
        _as(total if asked else None, input, stride)
        for total, asked, stride in zip(sums, mask[1:3], strides[1:], strict=True)
    )
    shape = subtrahend.shape if mask[3] else (0,)
    return grad_input, grad_weight, grad_bias, grad_subtrahend.to(input.dtype).expand(shape).clone()


def _tail_backward(grad_output: Tensor, u: Tensor, subtrahend: Tensor, min: float, max: float) -> tuple[Tensor, Tensor]:
    """The gradients with respect to the convolution's output ``u``, which is overwritten, and to the subtrahend.

    clamp passes the gradient where min <= value <= max, and none where the value is NaN.
    """
    m = torch.logsumexp(u, dim=1, keepdim=True)
    gate = torch.sigmoid(m + 3)
    value = m * gate / 6 - subtrahend
    d_value = torch.where((value >= min) & (value <= max), grad_output, 0)
    d_m = d_value * (gate + m * gate * (1 - gate)) / 6
    return u.sub_(m).exp_().mul_(d_m), -d_value.sum()
