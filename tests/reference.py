"""The oracle: transposed convolution by its definition, in float64, and the rule of accuracy.

Everything follows from one loop over taps. With I, k, s, p, d the size, kernel, stride, padding and dilation of an
axis, tap t adds input i times w[t] to output i * s - p + t * d where that is in range:

    out[n, g, o, i * s - p + t * d] += sum over c of in[n, g, c, i] * w[g, c, o, t]

The gradients run the same loop with the roles exchanged. An element takes part exactly where the definition says so:
NaN and inf reach no other output. All results are float64 on the device of the input.

    max |y - ref| / (sum |x||w| + |b|) <= max(2 * PyTorch's own in that dtype, floor of the dtype)

is the rule of accuracy; a gradient is measured by its own sum of absolute products.
"""

import contextlib
import functools
import itertools

import torch
import torch.nn.functional as F

FLOORS = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-48}
TF32_FLOOR = 2.0**-10
_F = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
ACTIVATIONS = {
    "none": lambda x, alpha: x.clone(),
    "relu": lambda x, alpha: F.relu(x),
    "leaky_relu": F.leaky_relu,
    "silu": lambda x, alpha: F.silu(x),
    "gelu": lambda x, alpha: F.gelu(x),
    "gelu_tanh": lambda x, alpha: F.gelu(x, approximate="tanh"),
    "tanh": lambda x, alpha: x.tanh(),
    "sigmoid": lambda x, alpha: x.sigmoid(),
    # In float64 on a GPU, PyTorch's takes 1 / 6 in float32.
    "hardswish": lambda x, alpha: x * (x + 3).clamp(0, 6) / 6 if x.dtype == torch.float64 else F.hardswish(x),
}
# The derivatives that an activation's own output determines, times a gradient, by ATen.
OF_OUTPUT = {
    "relu": lambda grad, y, alpha: torch.ops.aten.threshold_backward(grad, y, 0),
    "leaky_relu": lambda grad, y, alpha: torch.ops.aten.leaky_relu_backward(grad, y, alpha, True),
    "tanh": lambda grad, y, alpha: torch.ops.aten.tanh_backward(grad, y),
    "sigmoid": lambda grad, y, alpha: torch.ops.aten.sigmoid_backward(grad, y),
}
# h(v) = v * sigmoid(v + 3) / 6 is at most 0.1678 steep (at v = 2.03), its derivative at most 0.1029 (at v = -2.39).
HARDSWISH_SLOPE = 0.17
HARDSWISH_CURVATURE = 0.11
# Products of anything at least this large with usual weights and inputs, and their parts in TF32, are normal numbers.
SMALLEST_GRADIENT = 2.0**-96


def per_axis(value, ndim):
    """An int, or a list of one or `ndim` ints, as a tuple of `ndim` ints."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * ndim if len(values) == 1 else values


def output_size(size, kernel, stride=1, padding=0, output_padding=0, dilation=1):
    """The output's spatial sizes for the input's spatial sizes."""
    n = len(size)
    args = (per_axis(v, n) for v in (stride, padding, output_padding, dilation))
    rows = zip(size, kernel, *args, strict=True)
    return tuple((i - 1) * s - 2 * p + d * (k - 1) + op + 1 for i, k, s, p, op, d in rows)


def conv_transpose(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """conv_transpose{1,2,3}d of any dtype in float64; the dimension is the weight's rank less two."""
    x, w, batched = _grouped(input, weight, groups)
    ndim = w.ndim - 3
    size = output_size(x.shape[3:], w.shape[3:], stride, padding, output_padding, dilation)
    out = x.new_zeros(*x.shape[:2], w.shape[2], *size)
    for tap, inputs, outputs in _taps(x.shape[3:], w.shape[3:], size, stride, padding, dilation):
        out[(..., *outputs)] += torch.einsum("ngc...,gco->ngo...", x[(..., *inputs)], w[(..., *tap)])
    out = out.flatten(1, 2)
    if bias is not None:
        out += bias.detach().double().reshape(-1, *[1] * ndim)
    return out if batched else out[0]


def magnitude(input, weight, bias=None, *args, **kwargs):
    """sum |x||w| + |b|, the scale of every output's rounding errors."""
    return conv_transpose(input.abs(), weight.abs(), None if bias is None else bias.abs(), *args, **kwargs)


def conv_transpose_backward(grad_output, input, weight, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """The float64 gradients with respect to input, weight and bias of conv_transpose."""
    x, w, batched = _grouped(input, weight, groups)
    grad = grad_output.detach().double()
    grad = (grad if batched else grad[None]).unflatten(1, (groups, w.shape[2]))
    grad_x, grad_w = torch.zeros_like(x), torch.zeros_like(w)
    for tap, inputs, outputs in _taps(x.shape[3:], w.shape[3:], grad.shape[3:], stride, padding, dilation):
        used = grad[(..., *outputs)]
        grad_x[(..., *inputs)] += torch.einsum("ngo...,gco->ngc...", used, w[(..., *tap)])
        flat_x, flat_grad = x[(..., *inputs)].flatten(3), used.flatten(3)
        grad_w[(..., *tap)] = torch.einsum("ngci,ngoi->gco", flat_x, flat_grad)
    grad_x = grad_x.flatten(1, 2)
    grad_b = grad.flatten(1, 2).sum(dim=[0, *range(2, grad.ndim - 1)])
    return grad_x if batched else grad_x[0], grad_w.flatten(0, 1), grad_b


def conv_transpose_at(index, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """The elements of a batched conv_transpose at the rows (n, channel, position...) of `index`; for huge outputs."""
    ndim = weight.ndim - 2
    stride, padding, dilation = (per_axis(v, ndim) for v in (stride, padding, dilation))
    index = index.to(input.device)
    sample, channel, out = index[:, 0], index[:, 1], index[:, 2:]
    per_group_in, per_group_out = input.shape[1] // groups, weight.shape[1]
    channels = (channel // per_group_out * per_group_in)[:, None] + torch.arange(per_group_in, device=input.device)
    values = torch.zeros(len(index), dtype=torch.float64, device=input.device)
    for tap in itertools.product(*map(range, weight.shape[2:])):
        reach = [out[:, a] + padding[a] - tap[a] * dilation[a] for a in range(ndim)]
        source = [torch.div(r, s, rounding_mode="floor") for r, s in zip(reach, stride, strict=True)]
        valid = torch.ones(len(index), dtype=torch.bool, device=input.device)
        for a in range(ndim):
            valid &= (reach[a] % stride[a] == 0) & (source[a] >= 0) & (source[a] < input.shape[2 + a])
        at = [s[valid][:, None] for s in source]
        x = input.detach()[(sample[valid][:, None], channels[valid], *at)].double()
        w = weight.detach()[(channels[valid], (channel[valid] % per_group_out)[:, None], *tap)].double()
        values[valid] += (x * w).sum(1)
    return values if bias is None else values + bias.detach().double()[channel]


def hardswish_slope(value):
    """The derivative of h(v) = v * sigmoid(v + 3) / 6."""
    gate = torch.sigmoid(value + 3)
    return (gate + value * gate * (1 - gate)) / 6


def logsumexp_hardswish(
    input, weight, bias, subtrahend, stride=1, padding=0, output_padding=0, groups=1, dilation=1, min=-1.0, max=1.0
):
    """clamp(h(logsumexp over channels of conv_transpose3d) - subtrahend, min, max) in float64."""
    y = conv_transpose(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return chain_tail(y, subtrahend.detach().double(), min, max)


def chain_tail(conv, subtrahend, min, max):
    """What follows the convolution, in the dtype of `conv`: plain torch, whose NaN and inf are the right ones."""
    value = torch.logsumexp(conv, dim=-4, keepdim=True)
    return torch.clamp(value * torch.sigmoid(value + 3) / 6 - subtrahend.reshape(()), min, max)


def logsumexp_hardswish_backward(
    grad_output,
    input,
    weight,
    bias,
    subtrahend,
    stride=1,
    padding=0,
    output_padding=0,
    groups=1,
    dilation=1,
    min=-1.0,
    max=1.0,
):
    """The float64 gradients of logsumexp_hardswish with respect to input, weight, bias and subtrahend."""
    conv_args = (stride, padding, output_padding, groups, dilation)
    y = conv_transpose(input, weight, bias, *conv_args)
    value = torch.logsumexp(y, dim=-4, keepdim=True)
    shifted = value * torch.sigmoid(value + 3) / 6 - subtrahend.detach().double().reshape(())
    grad = grad_output.detach().double() * ((shifted >= min) & (shifted <= max))
    grad_y = grad * hardswish_slope(value) * torch.softmax(y, dim=-4)
    return *conv_transpose_backward(grad_y, input, weight, *conv_args), -grad.sum().reshape(subtrahend.shape)


def floor(dtype, tf32=False):
    """The relative error that the rule of accuracy always allows."""
    return TF32_FLOOR if tf32 and dtype == torch.float32 else FLOORS[dtype]


def output_rule(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1, tf32=False):
    """The rule of accuracy for outputs of this conv_transpose1d, 2d or 3d: a function that asserts it of one."""
    args = (stride, padding, output_padding, groups, dilation)

    def pytorch():
        with torch.no_grad(), _precision(tf32):
            return _F[weight.ndim - 3](input, weight, bias, *args)

    expected = conv_transpose(input, weight, bias, *args)
    scale = magnitude(input, weight, bias, *args)
    return _rule([expected], [scale], input.dtype, lambda: [pytorch()], tf32, ["output"])


def activation_rule(activation, alpha, input, weight, bias, *args, tf32=False):
    """The rule for outputs of this conv_transpose1d_act, 2d or 3d.

    Its scale is the convolution's, by at most 1.5, hardswish's slope, or alpha, and the output's own rounding.
    """
    function = ACTIVATIONS[activation]

    def pytorch():
        with torch.no_grad(), _precision(tf32):
            return function(_F[weight.ndim - 3](input, weight, bias, *args), alpha)

    expected = function(conv_transpose(input, weight, bias, *args), alpha)
    scale = max(1.5, abs(alpha)) * magnitude(input, weight, bias, *args) + expected.abs().nan_to_num()
    return _rule([expected], [scale], input.dtype, lambda: [pytorch()], tf32, ["output"])


def activation_gradient(activation, alpha, grad_output, conv, output):
    """The gradient at the convolution in the dtype of the call, from the rounded tensor that autograd keeps: the
    ``output`` where that determines the derivative, else ``conv``. So rounding at a kink is no error of a gradient."""
    if activation in OF_OUTPUT and not (activation == "leaky_relu" and alpha < 0):
        return OF_OUTPUT[activation](grad_output, output, alpha)
    leaf = conv.detach().requires_grad_()
    activated = F.hardswish(leaf) if activation == "hardswish" else ACTIVATIONS[activation](leaf, alpha)
    return torch.autograd.grad(activated, leaf, grad_output)[0]


def gradients_rule(grad_output, input, weight, stride=1, padding=0, output_padding=0, groups=1, dilation=1, tf32=False):
    """The rule for (grad_input, grad_weight, grad_bias); a gradient that is None is not asked."""
    args = (stride, padding, output_padding, groups, dilation)

    def pytorch():
        leaves = [input.detach().requires_grad_(), weight.detach().requires_grad_()]
        leaves.append(weight.new_zeros(weight.shape[1] * groups, requires_grad=True))
        with _precision(tf32):
            return torch.autograd.grad(_F[weight.ndim - 3](*leaves, *args), leaves, grad_output)

    expected = conv_transpose_backward(grad_output, input, weight, *args)
    scales = conv_transpose_backward(grad_output.abs(), input.abs(), weight.abs(), *args)
    names = ["grad_input", "grad_weight", "grad_bias"]
    return _rule(expected, scales, input.dtype, pytorch, tf32, names)


def chain_rule(
    input,
    weight,
    bias,
    subtrahend,
    stride=1,
    padding=0,
    output_padding=0,
    groups=1,
    dilation=1,
    min=-1.0,
    max=1.0,
    tf32=False,
):
    """The rule for outputs of this conv_transpose3d_logsumexp_hardswish.

    Its scale follows the error through the chain: logsumexp is no steeper than 1 in its largest argument error (the
    convolution's scale, at the worst channel) and rounds relative to its own size; h is no steeper than
    HARDSWISH_SLOPE; the subtraction and the store round relative to their operands; clamp adds nothing.
    """
    args = (stride, padding, output_padding, groups, dilation)

    def pytorch():
        with torch.no_grad(), _precision(tf32):
            return chain_tail(F.conv_transpose3d(input, weight, bias, *args), subtrahend, min, max)

    conv = conv_transpose(input, weight, bias, *args)
    value = torch.logsumexp(conv, dim=-4, keepdim=True)
    shift = subtrahend.detach().double().reshape(())
    expected = chain_tail(conv, shift, min, max)
    scale = HARDSWISH_SLOPE * _logsumexp_scale(value, input, weight, bias, args)
    scale = scale + (value * torch.sigmoid(value + 3) / 6).abs() + shift.abs() + expected.abs()
    return _rule([expected], [scale], input.dtype, lambda: [pytorch()], tf32, ["output"])


def chain_gradients_rule(
    grad_output,
    input,
    weight,
    bias,
    subtrahend,
    stride=1,
    padding=0,
    output_padding=0,
    groups=1,
    dilation=1,
    min=-1.0,
    max=1.0,
    tf32=False,
):
    """The rule for the chain's gradients (input, weight, bias, subtrahend); one that is None is not asked.

    The gradient at channel c of the convolution is grad * h'(value) * softmax_c. An error e of the convolution changes
    softmax_c by at most 2 e of itself and h' by HARDSWISH_CURVATURE * e, which gives the scale there; from there on it
    is the scale of a convolution's gradients. `grad_output` must be zero near the bounds of clamp (away_from_bounds).
    """
    args = (stride, padding, output_padding, groups, dilation)

    def pytorch():
        leaves = [t.detach().requires_grad_() for t in (input, weight, subtrahend)]
        leaves.insert(2, weight.new_zeros(weight.shape[1] * groups) if bias is None else bias.detach())
        leaves[2].requires_grad_()
        with _precision(tf32):
            conv = F.conv_transpose3d(*leaves[:3], *args)
            return torch.autograd.grad(chain_tail(conv, leaves[3], min, max), leaves, grad_output)

    expected = logsumexp_hardswish_backward(grad_output, input, weight, bias, subtrahend, *args, min=min, max=max)
    conv = conv_transpose(input, weight, bias, *args)
    value = torch.logsumexp(conv, dim=-4, keepdim=True)
    error = _logsumexp_scale(value, input, weight, bias, args)
    scale = grad_output.double().abs() * torch.softmax(conv, dim=-4)
    scale = scale * (HARDSWISH_SLOPE * (1 + 2 * error) + HARDSWISH_CURVATURE * error)
    scales = conv_transpose_backward(scale, input.abs(), weight.abs(), *args)
    scales = *scales, grad_output.double().abs().sum().reshape(subtrahend.shape)
    names = ["grad_input", "grad_weight", "grad_bias", "grad_subtrahend"]
    return _rule(expected, scales, input.dtype, pytorch, tf32, names)


def assert_accurate(actual, *args, **kwargs):
    """output_rule(...) for one output."""
    output_rule(*args, **kwargs)([actual])


def assert_gradients_accurate(actual, *args, **kwargs):
    """gradients_rule(...) for one tuple of gradients."""
    gradients_rule(*args, **kwargs)(actual)


def assert_chain_accurate(actual, *args, **kwargs):
    """chain_rule(...) for one output."""
    chain_rule(*args, **kwargs)([actual])


def assert_chain_gradients_accurate(actual, *args, **kwargs):
    """chain_gradients_rule(...) for one tuple of gradients."""
    chain_gradients_rule(*args, **kwargs)(actual)


def away_from_bounds(grad_output, input, weight, bias, subtrahend, *args, min=-1.0, max=1.0, margin=0.02):
    """grad_output with zeros where rounding could move a value across a bound of clamp, where the derivative jumps."""
    open_range = {"min": -torch.inf, "max": torch.inf}
    value = logsumexp_hardswish(input, weight, bias, subtrahend, *args, **open_range)
    near = ((value - min).abs() < margin) | ((value - max).abs() < margin)
    return grad_output.masked_fill(near, 0)


def away_from_underflow(grad_output, gradient):
    """grad_output with zeros where the gradient that an activation makes of it is so small that its products leave the
    normal range of float32: tensor cores keep few of such a number's bits. gelu's derivative is that small from -12 on.
    """
    tiny = gradient.abs() < SMALLEST_GRADIENT
    return grad_output.masked_fill(tiny, 0) if tiny.any() else grad_output  # with its own strides


def _rule(expected, scales, dtype, pytorch, tf32, names):
    """A function that asserts |actual - expected| <= bound * scale elementwise, with NaN and inf where `expected` has
    them, of a list of tensors. `pytorch` is called, for its own errors, only where the floor does not suffice."""
    own = functools.cache(pytorch)

    def check(actual):
        for i, name in enumerate(names):
            if actual[i] is None:
                continue
            assert actual[i].dtype == dtype, f"{name} is {actual[i].dtype}, not {dtype}"
            shape, right = tuple(actual[i].shape), tuple(expected[i].shape)
            assert shape == right, f"{name} is {shape}, not {right}"
            error = _error(actual[i], expected[i], scales[i], dtype, name)
            bound = floor(dtype, tf32)
            if error > bound:
                bound = max(bound, 2 * _error(own()[i], expected[i], scales[i], dtype, name, check_masks=False))
            assert error <= bound, f"{name}: error {error:.3e} of the sum of absolute products, allowed {bound:.3e}"

    return check


def _error(actual, expected, scale, dtype, name, check_masks=True):
    """The largest error relative to `scale` over the outputs that are finite by definition and in the dtype's range."""
    if expected.numel() == 0:
        return 0.0
    limits = torch.finfo(dtype)
    actual = actual.detach().double()
    # Where the sum of absolute products leaves the range of the dtype, sums may overflow on the way.
    in_range = ~(scale >= limits.max)
    nonfinite = ~expected.isfinite()
    if check_masks:
        checked = torch.where(in_range | nonfinite, actual, expected)
        for mask in (torch.isnan, torch.isposinf, torch.isneginf):
            wrong = mask(checked) != mask(expected)
            assert not wrong.any(), _describe(f"{name}: {mask.__name__} differs", wrong, actual, expected)
    compared = expected.isfinite() & in_range
    # A result below the normal range rounds to a multiple of the smallest number there is.
    error = ((actual - expected).abs() - limits.smallest_normal * limits.eps).clamp(min=0)
    ratio = torch.where(compared & (error > 0), error / scale, 0.0)
    return ratio.nan_to_num(nan=torch.inf).max().item()


def _describe(text, wrong, actual, expected):
    at = tuple(wrong.nonzero()[0].tolist())
    values = f"{actual[at].item()}, not {expected[at].item()}"
    return f"{text} at {int(wrong.sum())} of {wrong.numel()} elements, first at {at}: {values}"


def _logsumexp_scale(value, input, weight, bias, args):
    worst_channel = magnitude(input, weight, bias, *args).amax(dim=-4, keepdim=True)
    return worst_channel + value.abs() + 1


def _grouped(input, weight, groups):
    """Input (N, g, C_in/g, ...) and weight (g, C_in/g, C_out/g, ...) in float64, and whether the input has a batch."""
    batched = input.ndim == weight.ndim
    x = input.detach().double()
    x = x if batched else x[None]
    per_group = x.shape[1] // groups  # not -1, which an empty batch leaves open
    return x.unflatten(1, (groups, per_group)), weight.detach().double().unflatten(0, (groups, per_group)), batched


def _taps(in_size, kernel, out_size, stride, padding, dilation):
    """Every tap with the slices of the inputs that it uses and of the outputs that they reach, one to one."""
    ndim = len(kernel)
    axes = zip(in_size, kernel, out_size, *(per_axis(v, ndim) for v in (stride, padding, dilation)), strict=True)
    for taps in itertools.product(*(list(_axis_taps(*axis)) for axis in axes)):
        yield tuple(t for t, _, _ in taps), tuple(i for _, i, _ in taps), tuple(o for _, _, o in taps)


def _axis_taps(size, kernel, out, stride, padding, dilation):
    for t in range(kernel):
        shift = t * dilation - padding
        first = max(0, -(shift // stride))
        end = min(size, (out - 1 - shift) // stride + 1)
        if first < end:
            start = first * stride + shift
            yield t, slice(first, end), slice(start, (end - 1) * stride + shift + 1, stride)


@contextlib.contextmanager
def _precision(tf32):
    """PyTorch at the precision that is asked of us."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
        yield
