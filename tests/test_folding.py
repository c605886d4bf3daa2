"""fastconvt.fold_batchnorm against the two modules, in float64."""

import copy

import pytest
import torch
from torch import nn

import fastconvt

CONV = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def layers(spatial, groups, bias=True, affine=True, channels=(6, 12)):
    conv = CONV[spatial](*channels, 3, stride=2, padding=1, output_padding=1, groups=groups, bias=bias)
    bn = NORM[spatial](channels[1], eps=1e-3, affine=affine).eval()
    for tensor in (bn.running_mean, bn.weight, bn.bias):
        if tensor is not None:
            nn.init.normal_(tensor)
    nn.init.uniform_(bn.running_var, 0.1, 3)
    return conv, bn


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("bias", "affine"), [(True, True), (False, True), (True, False), (False, False)])
def test_the_folded_layer_is_the_two(spatial, groups, bias, affine):
    conv, bn = layers(spatial, groups, bias, affine)
    before = copy.deepcopy(conv.state_dict()), copy.deepcopy(bn.state_dict())
    folded = fastconvt.fold_batchnorm(conv, bn)
    for module, state in zip((conv, bn), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert type(folded) is type(conv) and folded.groups == groups and folded.stride == conv.stride
    x = torch.randn(2, 6, *[5] * spatial, dtype=torch.float64)
    expected = bn.double()(conv.double()(x))
    torch.testing.assert_close(folded.double()(x), expected, rtol=1e-6, atol=1e-6)


def test_dtype_layout_and_mode_are_those_of_conv():
    conv, bn = layers(2, 1, channels=(8, 16))
    conv = conv.to(torch.bfloat16, memory_format=torch.channels_last).eval().requires_grad_(False)
    folded = fastconvt.fold_batchnorm(conv, bn)
    assert folded.weight.dtype == folded.bias.dtype == torch.bfloat16
    assert folded.weight.is_contiguous(memory_format=torch.channels_last) and not folded.training
    assert not any(p.requires_grad for p in folded.parameters())
    scale = bn.weight.double() * torch.rsqrt(bn.running_var.double() + bn.eps)
    assert torch.equal(folded.weight, (conv.weight.double() * scale[:, None, None]).bfloat16())  # rounded once
    assert all(p.requires_grad for p in fastconvt.fold_batchnorm(*layers(1, 1)).parameters())


@pytest.mark.parametrize(
    ("conv", "bn", "error", "message"),
    [
        (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4).eval(), TypeError, "not Conv2d"),
        (nn.ConvTranspose2d(2, 4, 3), nn.BatchNorm3d(4).eval(), TypeError, "BatchNorm2d after a ConvTranspose2d"),
        (nn.ConvTranspose2d(2, 4, 3), nn.LayerNorm(4), TypeError, "not LayerNorm"),
        (nn.ConvTranspose2d(2, 4, 3), nn.BatchNorm2d(2).eval(), ValueError, "2 features, .* 4 output channels"),
        (nn.ConvTranspose1d(2, 4, 3), nn.BatchNorm1d(4), ValueError, "training mode"),
        (
            nn.ConvTranspose1d(2, 4, 3),
            nn.BatchNorm1d(4, track_running_stats=False).eval(),
            ValueError,
            "running statistics",
        ),
    ],
)
def test_what_cannot_be_folded_is_refused(conv, bn, error, message):
    with pytest.raises(error, match=message):
        fastconvt.fold_batchnorm(conv, bn)
