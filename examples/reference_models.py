"""Both reference layers as modules: in plain PyTorch, and with fastconvt where only ``forward`` changes.

A pair has the same constructor arguments and the same parameters, so a state dict of one loads into the other.
Run it: ``python examples/reference_models.py`` compares the pairs on random data.
"""

import torch
from torch import nn

import fastconvt


class Upsample2d(nn.Module):
    """A grouped, strided and dilated transposed convolution: (N, 32, H, W) to (N, 64, 2H - 1 + 2, 3W - 3 + 3 ...).

    The default arguments are those of the reference layer: (16, 32, 128, 256) gives (16, 64, 257, 766).
    """

    def __init__(
        self,
        in_channels=32,
        out_channels=64,
        kernel_size=(3, 5),
        stride=(2, 3),
        padding=(1, 2),
        dilation=(2, 1),
        groups=4,
        bias=False,
    ):
        super().__init__()
        self.conv = nn.ConvTranspose2d(
            in_channels, out_channels, kernel_size, stride, padding, 0, groups, bias, dilation
        )

    def forward(self, x):
        return self.conv(x)


class FastUpsample2d(Upsample2d):
    """Upsample2d, computed by fastconvt."""

    def forward(self, x):
        conv = self.conv
        return fastconvt.conv_transpose2d(
            x,
            conv.weight,
            conv.bias,
            stride=conv.stride,
            padding=conv.padding,
            groups=conv.groups,
            dilation=conv.dilation,
        )


class Upsample3dChain(nn.Module):
    """A 3D transposed convolution, logsumexp over its channels, a hardswish-like gate, a subtraction and a clamp.

    The default arguments are those of the reference layer: (128, 3, 16, 32, 32) gives (128, 1, 31, 63, 63).
    ``subtrahend_shape`` must have one element.
    """

    def __init__(
        self, in_channels=3, out_channels=16, kernel_size=3, stride=2, padding=1, subtrahend_shape=(1, 1, 1, 1)
    ):
        super().__init__()
        self.conv = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding)
        self.subtrahend = nn.Parameter(torch.randn(subtrahend_shape))

    def forward(self, x):
        x = torch.logsumexp(self.conv(x), dim=1, keepdim=True)
        x = x * torch.sigmoid(x + 3) / 6
        return torch.clamp(x - self.subtrahend, min=-1, max=1)


class FastUpsample3dChain(Upsample3dChain):
    """Upsample3dChain as one operator: the convolution's output, 16 times the result, never goes to memory."""

    def forward(self, x):
        conv = self.conv
        return fastconvt.conv_transpose3d_logsumexp_hardswish(
            x, conv.weight, conv.bias, self.subtrahend, stride=conv.stride, padding=conv.padding, min=-1, max=1
        )


PAIRS = {
    "2D": (Upsample2d, FastUpsample2d, (2, 32, 128, 256)),
    "3D chain": (Upsample3dChain, FastUpsample3dChain, (16, 3, 16, 32, 32)),
}


def main():
    for name, (plain_class, fast_class, shape) in PAIRS.items():
        plain, fast = plain_class(), fast_class()
        fast.load_state_dict(plain.state_dict(), strict=True)
        x = torch.randn(shape)
        with torch.no_grad():
            expected, actual = plain(x), fast(x)
        difference = (actual - expected).abs().max().item()
        print(f"{name}: {list(shape)} to {list(actual.shape)}, largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
