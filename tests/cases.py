"""The problems that every test iterates, and the draw that adds random ones (hypothesis and the fuzzer share it)."""

import dataclasses

import torch
from hypothesis import strategies

from tests import reference

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: shapes as the operator takes them, (N, C_in, ...) or unbatched, and (C_in, C_out / groups, ...)."""

    name: str
    input: tuple
    weight: tuple
    stride: int | tuple = 1
    padding: int | tuple = 0
    output_padding: int | tuple = 0
    groups: int = 1
    dilation: int | tuple = 1
    bias: bool = True

    @property
    def ndim(self):
        return len(self.weight) - 2

    @property
    def batched(self):
        return len(self.input) == len(self.weight)

    @property
    def op(self):
        return f"conv_transpose{self.ndim}d"

    @property
    def out_channels(self):
        return self.weight[1] * self.groups

    @property
    def args(self):
        """stride, padding, output_padding, groups, dilation as the operators take them, after the tensors."""
        lists = [list(reference.per_axis(getattr(self, field), self.ndim)) for field in SPATIAL_FIELDS]
        return (*lists[:3], self.groups, lists[3])

    @property
    def output(self):
        stride, padding, output_padding, _, dilation = self.args
        size = self.input[-self.ndim :]
        spatial = reference.output_size(size, self.weight[2:], stride, padding, output_padding, dilation)
        return (*self.input[: len(self.input) - self.ndim - 1], self.out_channels, *spatial)

    def tensors(self, dtype=torch.float32, device="cpu", seed=0, channels_last=(False, False)):
        """Input, weight and bias (or None); `channels_last` is for input and weight."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [self.input, self.weight, (self.out_channels,)]
        x, w, b = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        x, w = (to_channels_last(t) if last else t for t, last in zip((x, w), channels_last, strict=True))
        return x, w, b if self.bias else None

    def grad_output(self, dtype=torch.float32, device="cpu", seed=1):
        return torch.randn(self.output, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    def __str__(self):
        return self.name


SPATIAL_FIELDS = ("stride", "padding", "output_padding", "dilation")


def to_channels_last(tensor):
    """The tensor in the channels_last of its rank; other ranks have none and stay."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats.get(tensor.ndim, torch.contiguous_format))


CASES = [
    # The two reference layers and others of real networks, at a size that a test can afford.
    Case("reference_2d", (2, 32, 6, 11), (32, 16, 3, 5), (2, 3), (1, 2), 0, 4, (2, 1), bias=False),
    Case("reference_3d", (2, 3, 4, 6, 7), (3, 16, 3, 3, 3), 2, 1),
    Case("unet_k2_s2", (2, 8, 5, 7), (8, 4, 2, 2), 2),
    Case("unet_k2_s2_3d", (1, 8, 3, 4, 5), (8, 6, 2, 2, 2), 2),
    Case("nnunet_anisotropic", (1, 4, 3, 4, 5), (4, 3, 1, 2, 2), (1, 2, 2)),
    Case("video_k244", (1, 3, 2, 3, 5), (3, 4, 2, 4, 4), (2, 4, 4)),
    Case("gan_k4_s2_p1", (2, 6, 5, 6), (6, 5, 4, 4), 2, 1, bias=False),
    Case("gan_first_layer", (2, 10, 1, 1), (10, 7, 4, 4)),
    Case("doubling_k3_s2_op1", (2, 5, 6, 7), (5, 4, 3, 3), 2, 1, 1),
    Case("doubling_k3_s2_op1_3d", (1, 4, 3, 5, 4), (4, 3, 3, 3, 3), 2, 1, 1),
    Case("bilinear_head_k16_s8", (1, 3, 4, 5), (3, 1, 16, 16), 8, 4, 0, 3, bias=False),
    Case("depthwise_k4_s2", (2, 9, 6, 7), (9, 1, 4, 4), 2, 1, 0, 9),
    Case("depthwise_k4_s2_in_vectors", (2, 3, 5, 16), (3, 1, 4, 4), 2, 1, 0, 3),
    Case("fsrcnn_k9_s3", (1, 7, 5, 6), (7, 1, 9, 9), 3, 4, 2),
    Case("head_3d_k4_s2", (2, 17, 3, 4, 6), (17, 2, 4, 4, 4), 2, (1, 0, 2)),
    Case("vocoder_k16_s8", (2, 8, 13), (8, 4, 16), 8, 4),
    Case("filter_bank_k64_s16", (2, 40, 13), (40, 2, 64), 16, 24),
    Case("audio_k6_s3_depthwise", (2, 10, 12), (10, 1, 6), 3, 2, 1, 10),
    Case("stylegan_k3_s1", (1, 4, 6, 6), (4, 4, 3, 3), 1, 1),
    # Every parameter different along each axis.
    Case("unequal_1d", (2, 4, 9), (4, 3, 5), 3, 2, 1, 2, 2),
    Case("unequal_2d", (2, 6, 5, 8), (6, 2, 3, 4), (2, 3), (1, 0), (2, 1), 2, (3, 2)),
    Case("unequal_3d", (2, 6, 3, 4, 6), (6, 5, 1, 3, 2), (1, 2, 3), (0, 2, 1), (1, 0, 2), 3, (2, 1, 3)),
    Case("planes_of_few_channels", (2, 3, 4, 5, 8), (3, 4, 1, 3, 4), (1, 2, 2), (0, 1, 1)),
    Case("unequal_3d_no_groups", (1, 2, 5, 2, 4), (2, 3, 3, 2, 4), (3, 1, 2), (2, 1, 0), (0, 3, 1), 1, (1, 4, 2)),
    # Stride and kernel.
    Case("pointwise", (2, 5, 4, 6), (5, 7, 1, 1)),
    Case("pointwise_s3", (1, 4, 3, 5), (4, 3, 1, 1), 3, 0, 2),
    Case("stride_beyond_kernel", (1, 3, 4, 3), (3, 4, 2, 2), (5, 4), 1, (4, 2)),
    Case("stride_beyond_kernel_3d", (1, 2, 2, 3, 2), (2, 3, 1, 2, 1), (2, 4, 3), 0, (1, 3, 0)),
    Case("kernel_is_stride_p1_op1", (1, 3, 4, 5), (3, 2, 2, 2), 2, 1, 1),
    Case("kernel_is_twice_stride", (2, 4, 6, 5), (4, 3, 6, 6), 3, 1),
    Case("kernel_beyond_input", (1, 2, 2, 3), (2, 3, 7, 5), 2, 3, 1),
    Case("kernel_even_and_odd", (1, 3, 5, 5), (3, 2, 2, 5), (3, 2), (0, 1)),
    Case("long_kernel_1d", (1, 2, 30), (2, 3, 41), 1, 20),
    Case("prime_sizes", (1, 3, 13, 17), (3, 5, 3, 2), (2, 3), 1),
    # Dilation with and without stride: gcd of 1, 2 and the stride itself, where most phases have no tap.
    Case("dilation_s1", (2, 3, 5, 6), (3, 4, 3, 3), 1, 2, 0, 1, 2),
    Case("dilation_gcd_2", (1, 4, 4, 5), (4, 3, 3, 4), (4, 2), (1, 3), (3, 1), 1, (2, 4)),
    Case("dilation_is_stride", (1, 3, 4, 4), (3, 3, 3, 2), 3, 2, 0, 1, 3),
    Case("dilation_s6_d4", (1, 2, 5), (2, 3, 5), 6, 3, 5, 1, 4),
    Case("dilation_3d", (1, 2, 3, 4, 3), (2, 2, 3, 2, 3), 2, (2, 1, 0), 1, 1, 2),
    Case("dilation_of_the_stride", (2, 16, 5, 9), (16, 32, 3, 3), 2, 1, 0, 1, 2),
    Case("dilation_depthwise", (1, 5, 6, 4), (5, 1, 3, 3), 2, 2, 1, 5, (3, 2)),
    # Output padding and padding at their limits.
    Case("output_padding_beyond_stride", (1, 2, 3, 4), (2, 3, 2, 2), 1, 0, (2, 3), 1, 4),
    Case("output_padding_of_dilation_s1", (1, 4, 1, 1), (4, 1, 3, 3), 1, 0, 1, 1, 2),
    Case("output_padding_per_axis_3d", (1, 3, 3, 4, 2), (3, 4, 3, 3, 3), 2, 1, (0, 1, 0)),
    Case("padding_beyond_kernel", (1, 3, 9, 11), (3, 2, 3, 3), 2, 5),
    Case("padding_leaves_one", (1, 2, 3, 3), (2, 3, 1, 1), 1, 1),
    Case("padding_cuts_whole_taps", (1, 2, 1, 4), (2, 3, 5, 5), 1, 2),
    # Channels and groups.
    Case("groups_2_of_12", (1, 12, 4, 5), (12, 2, 3, 3), 2, 1, 0, 2),
    Case("groups_3_of_6", (2, 6, 3, 4), (6, 3, 2, 3), (1, 2), 0, 0, 3),
    Case("depthwise_multiplier_3", (1, 4, 5, 3), (4, 3, 3, 3), 2, 1, 1, 4),
    Case("many_groups", (1, 40, 3, 3), (40, 2, 3, 3), 2, 1, 0, 20),
    Case("many_inputs_one_output", (1, 300, 3, 4), (300, 1, 3, 3), 2, 1),
    Case("one_input_many_outputs", (1, 1, 3, 4), (1, 130, 3, 3), 2, 1),
    Case("channels_512_to_67", (1, 512, 2, 3), (512, 67, 2, 2), 2),
    Case("channels_129_to_131_3d", (1, 129, 1, 2, 2), (129, 131, 2, 2, 2), 2),
    # Rows longer than any tile, and the shortest ones.
    Case("long_row", (1, 3, 2, 131), (3, 5, 3, 3), 2, 1, 1),
    Case("long_row_1d", (1, 2, 1025), (2, 3, 3), 2, 1),
    Case("long_row_s3_3d", (1, 2, 1, 2, 70), (2, 3, 2, 2, 5), (1, 2, 3), (0, 0, 2)),
    Case("width_1", (2, 3, 5, 1), (3, 4, 3, 3), 2, 1, 1),
    Case("height_1", (2, 3, 1, 8), (3, 4, 1, 3), (1, 2), (0, 1), (0, 1)),
    Case("dense_k2_s2", (2, 24, 9, 16), (24, 16, 2, 2), 2),
    Case("dense_k2_s2_of_64", (2, 64, 7, 16), (64, 32, 2, 2), 2),
    Case("dense_k2_s2_of_12", (2, 72, 6, 12), (72, 40, 2, 2), 2),
    Case("dense_k4_s2", (2, 40, 5, 24), (40, 24, 4, 4), 2, 1),
    Case("dense_k3_s1", (2, 32, 9, 16), (32, 24, 3, 3), 1, 1),
    Case("one_pixel_3d", (2, 3, 1, 1, 1), (3, 4, 2, 3, 1), (2, 1, 1)),
    Case("output_of_one", (2, 3, 1), (3, 4, 1)),
    # Batches.
    Case("batch_0", (0, 2, 4, 4), (2, 3, 3, 3), 2),
    Case("batch_0_1d", (0, 4, 5), (4, 1, 3), 2, 1, 1, 2, bias=False),
    Case("batch_0_head", (0, 16, 6, 7), (16, 3, 2, 3), (3, 4), groups=2),
    Case("batch_0_3d", (0, 2, 3, 3, 3), (2, 3, 2, 2, 2), 2),
    Case("batch_17", (17, 2, 3, 2), (2, 3, 3, 3), 2, 1),
    Case("unbatched_1d", (3, 7), (3, 4, 4), 2, 1),
    Case("unbatched_2d", (4, 5, 3), (4, 3, 3, 2), (2, 1), (1, 0), (1, 0), 2),
    Case("unbatched_3d", (2, 3, 4, 3), (2, 3, 3, 2, 2), 2, 1, bias=False),
]
BY_NAME = {case.name: case for case in CASES}

# Kernel, stride, padding and output padding of draw_layer.
GEOMETRIES = 3 * [(2, 2, 0, 0), (4, 2, 1, 0), (3, 2, 1, 1)]  # the most usual ones
GEOMETRIES += [(4, 4, 0, 0), (3, 1, 1, 0), (1, 1, 0, 0), (8, 4, 2, 0), (5, 2, 2, 1), (4, 1, 0, 0), (16, 8, 4, 0)]


def draw_case(integer, max_elements=20_000):
    """A legal problem; `integer(low, high)` draws an int between both ends, from a random source or from hypothesis."""
    ndim = integer(1, 3)
    groups = integer(1, 4) if integer(0, 2) == 0 else 1
    depthwise = integer(0, 7) == 0
    channels_in = groups if depthwise else groups * integer(1, 9)
    channels_out = 1 if depthwise else integer(1, 9)
    if integer(0, 11) == 0:
        channels_in, channels_out = groups * integer(1, 80), integer(1, 80)
    longest = (40, 12, 6)[ndim - 1]
    axes = [_draw_axis(integer, longest) for _ in range(ndim)]
    batch = (integer(1, 3),) if integer(0, 9) else ((0,) if integer(0, 1) else ())
    case = _case_of("drawn", batch, channels_in, channels_out, groups, axes, bias=integer(0, 2) > 0)
    return case if _work(case) <= 50 * max_elements else draw_case(integer, max_elements)


def draw_relative(integer, max_elements=100_000):
    """A layer of one of the families that the plan knows by name: depthwise, heads of few output channels, few channels
    a group, taps that do not overlap, dense, many taps for few outputs, or a relative of one of the two reference
    layers. Small kernels, and long rows at times."""
    ndim = integer(1, 3)
    kind = ("depthwise", "head", "few", "shuffle", "dense", "taps", "relative", "relative")[integer(0, 7)]
    few, many, groups = {
        "depthwise": ((1,), (1, 1, 1, 2, 3), range(1, 13)),
        "head": (range(8, 40), (1, 2, 3, 4, 9), (1, 2)),
        "few": (range(1, 17), range(1, 17), range(1, 5)),
        "shuffle": (range(8, 70), range(1, 40), (1, 1, 2)),
        "dense": (range(8, 50), range(8, 50), (1, 1, 2, 3)),
        "taps": (range(8, 50), (1, 1, 2, 3, 4), (1,)),
        "relative": (
            ((1, 2, 3, 4), (4, 8, 16), (8,))[integer(0, 2)] if ndim < 3 else (1, 2, 3, 3, 4, 5),
            ((16,), (4, 8, 16, 32), range(1, 34))[integer(0, 2)],
            range(1, 6) if ndim < 3 else (1,),
        ),
    }[kind]
    channels_in, channels_out, groups = (of[integer(0, len(of) - 1)] for of in (few, many, groups))
    same = integer(0, 3) if kind == "head" else 3  # of all axes: kernel 3 or 4 with stride 2, or 9 with 2 to 4
    of_all = ((integer(3, 4), 2), (9, integer(2, 4)))[same] if same < 2 else None
    axes = []
    for axis in range(ndim):
        longest = 20 if ndim == 3 or axis < ndim - 1 else (70, 70, 600)[integer(0, 2)]
        kernel, stride, dilation = integer(1, 5), integer(1, 3), integer(1, 3) if integer(0, 1) else 1
        if kind == "taps":
            kernel, dilation = integer(4, 16 if ndim > 1 else 300), 1
            stride = max(1, kernel // integer(1, 4))
        elif kind == "shuffle" or (kind != "relative" and integer(0, 1)):
            stride = integer(1, 8 // ndim)
            kernel, dilation = stride * (1 if kind == "shuffle" else integer(1, 2)), 1
        if of_all:
            kernel, stride, dilation = *of_all, 1
        drawn = _finish_axis(integer, integer(1, longest), kernel, stride, dilation)
        if kind == "depthwise" and integer(0, 1):  # bilinear up-sampling of rows in whole vectors
            stride = (1, 2, 2, 4, 8)[integer(0, 4)]
            kernel, size = (2 * stride if stride > 1 else 3), 8 * integer(1, 1 + longest // 16)
            drawn = (size, kernel, stride, (kernel - stride) // 2, 0, 1)
        axes.append((drawn[0], kernel, stride, 0, 0, 1) if kind == "shuffle" and integer(0, 3) else drawn)
    batch, channels = (integer(1, 3),), groups * channels_in
    case = _case_of("relative", batch, channels, channels_out, groups, axes, bias=integer(0, 1) > 0)
    return case if _work(case) <= 50 * max_elements else draw_relative(integer, max_elements)


def draw_layer(integer, max_products=50_000_000):
    """A layer as networks have it: one geometry for all axes; mostly channels, and often rows, in whole vectors."""
    ndim, usual = integer(1, 3), integer(0, 3)
    kernel, stride, padding, output_padding = GEOMETRIES[integer(0, len(GEOMETRIES) - 1)]
    channels_in, channels_out = (8 * integer(1, 20) if usual else integer(1, 160) for _ in range(2))
    if integer(0, 4) == 0:
        channels_out = integer(1, 4)
    groups = 2 if integer(0, 7) == 0 else 1
    longest = (600, 64, 16)[ndim - 1]
    axes = [(integer(1, longest), kernel, stride, padding, output_padding, 1) for _ in range(ndim)]
    if integer(0, 2) > 0:
        axes[-1] = (8 * integer(1, longest // 8), *axes[-1][1:])
    if ndim > 1 and integer(0, 5) == 0:
        axes[0] = (axes[0][0], 1, 1, 0, 0, 1)  # as in anisotropic and in video networks
    batch = (integer(1, 4),)
    case = _case_of("layer", batch, groups * channels_in, channels_out, groups, axes, bias=integer(0, 1) > 0)
    fits = _work(case) * channels_in <= max_products and min(case.output) > 0
    return case if fits else draw_layer(integer, max_products)


def _case_of(name, batch, channels_in, channels_out, groups, axes, bias):
    """A case of `channels_out` output channels a group, from axes as _finish_axis returns them."""
    size, kernel, stride, padding, output_padding, dilation = zip(*axes, strict=True)
    input, weight = (*batch, channels_in, *size), (channels_in, channels_out, *kernel)
    return Case(name, input, weight, stride, padding, output_padding, groups, dilation, bias=bias)


def _work(case):
    return torch.Size(case.output).numel() * torch.Size(case.weight[2:]).numel()


def _draw_axis(integer, longest):
    size = integer(1, longest) if integer(0, 5) else 1
    kernel = integer(1, 5) if integer(0, 9) else integer(6, 17)
    stride = integer(1, 4) if integer(0, 9) else integer(5, 9)
    if integer(0, 4) == 0:
        stride = kernel
    dilation = integer(1, 4) if integer(0, 2) == 0 else 1
    return _finish_axis(integer, size, kernel, stride, dilation)


def _finish_axis(integer, size, kernel, stride, dilation):
    output_padding = integer(0, max(stride, dilation) - 1) if integer(0, 1) else 0
    span = (size - 1) * stride + dilation * (kernel - 1) + output_padding  # padding must leave one output
    padding = min(integer(0, kernel) if integer(0, 5) else integer(0, 20), span // 2)
    return size, kernel, stride, padding, output_padding, dilation


@strategies.composite
def cases(draw, max_elements=4_000):
    """The hypothesis strategy of legal problems."""
    return draw_case(lambda low, high: draw(strategies.integers(low, high)), max_elements)
