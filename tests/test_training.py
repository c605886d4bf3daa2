"""A DCGAN and a 3D U-Net train for 50 steps with our operators as they do with PyTorch's: their losses stay together.

A training is judged as a result is by the rule of accuracy. The reference is the same training in float64, from the
same parameters and data; the scale of a loss is the loss itself:

    max |loss - reference| / reference <= max(2 * PyTorch's own error, floor of the precision)

over all steps, with the floors of the rule. A loss is a mean over many outputs, whose roundings average out, and the
trainings are chosen so that little is made of the roundings of earlier steps: in float32 both stay within 2e-7. Hence
plain gradient descent (Adam makes a whole step of a gradient that is nothing but rounding), and SiLU and average
pooling around our layers: on which side of a relu a value falls is a matter of rounding, and one such element moves
these losses by 1e-5, in PyTorch's trainings as in ours.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastconvt
from tests import harness, reference

STEPS = 50


class Up(nn.Module):
    """A transposed convolution and an activation: PyTorch's two operators, or one of ours."""

    ours = False

    def __init__(self, conv, activation):
        super().__init__()
        self.conv, self.activation, self.ndim = conv, activation, conv.weight.ndim - 2

    def forward(self, x):
        arguments = x, self.conv.weight, self.conv.bias, self.conv.stride, self.conv.padding
        if self.ours:
            return getattr(fastconvt, f"conv_transpose{self.ndim}d_act")(*arguments, activation=self.activation)
        return reference.ACTIVATIONS[self.activation](harness.F_FUNCTIONS[self.ndim](*arguments), 0.01)


class Gan(nn.Module):
    """DCGAN: a generator from noise to images in [-1, 1], normalised between layers, and its judge."""

    def __init__(self, width, size):
        super().__init__()
        up, down = (functools.partial(conv, kernel_size=4, bias=False) for conv in (nn.ConvTranspose2d, nn.Conv2d))
        self.noise, self.size, self.rate = (2 * width, 1, 1), size, 0.8 / width
        self.network = nn.Sequential(
            *(Up(up(2 * width, 4 * width), "none"), nn.BatchNorm2d(4 * width), nn.SiLU()),
            *(Up(up(4 * width, 2 * width, stride=2, padding=1), "none"), nn.BatchNorm2d(2 * width), nn.SiLU()),
            Up(up(2 * width, 3, stride=2, padding=1), "tanh"),
        )
        layers = down(3, width, stride=2, padding=1), down(width, 2 * width, stride=2, padding=1), down(2 * width, 1)
        self.judge = nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2])

    def data(self, batch, generator):
        """Noise, and images of smooth blobs."""
        coarse = torch.randn(batch, 3, 4, 4, generator=generator)
        images = F.interpolate(coarse, size=(self.size,) * 2, mode="bilinear").tanh()
        return torch.randn(batch, *self.noise, generator=generator), images

    def losses(self, noise, images):
        """The losses, each with what it trains."""
        fake = self.network(noise)
        mistaken = F.softplus(self.judge(fake.detach())).mean() + F.softplus(-self.judge(images)).mean()
        return [(F.softplus(-self.judge(fake)).mean(), self.network), (mistaken, self.judge)]


class Unet(nn.Module):
    """A 3D U-Net of three levels that segments blobs; what upsamples in its decoder has a bias and a relu."""

    class Network(nn.Module):
        def __init__(self, width):
            super().__init__()
            conv = functools.partial(nn.Conv3d, kernel_size=3, padding=1)
            up = functools.partial(nn.ConvTranspose3d, kernel_size=2, stride=2)
            self.down = nn.ModuleList([conv(1, width), conv(width, 2 * width), conv(2 * width, 4 * width)])
            self.up = nn.ModuleList([Up(up(4 * width, 2 * width), "relu"), Up(up(2 * width, width), "relu")])
            self.merge = nn.ModuleList([conv(4 * width, 2 * width), conv(2 * width, width)])
            self.head = nn.Conv3d(width, 2, 1)

        def forward(self, x):
            skips = []
            for down in self.down[:2]:
                skips.append(F.silu(down(x)))
                x = F.avg_pool3d(skips[-1], 2)
            x = F.silu(self.down[2](x))
            for up, merge in zip(self.up, self.merge, strict=True):
                x = F.silu(merge(torch.cat([up(x), skips.pop()], 1)))
            return self.head(x)

    def __init__(self, width, size):
        super().__init__()
        self.network, self.size, self.rate = self.Network(width), size, 0.05

    def data(self, batch, generator):
        """Noisy volumes and their labels."""
        coarse = torch.randn(batch, 1, 2, 2, 2, generator=generator)
        volumes = F.interpolate(coarse, size=(self.size,) * 3, mode="trilinear")
        return volumes + 0.3 * torch.randn(volumes.shape, generator=generator), (volumes[:, 0] > 0).long()

    def losses(self, volumes, labels):
        return [(F.cross_entropy(self.network(volumes), labels), self.network)]


def train(model, data, ours=False, dtype=torch.float32, autocast=False, backend=None):
    """The losses of all steps, a column each, in float64. ``model`` stays as it is."""
    model = copy.deepcopy(model).to(dtype)
    for module in model.modules():
        module.ours = ours
    if backend:
        torch._dynamo.reset()
        model.network.compile(fullgraph=True, backend=backend)
    history = []
    for tensors in data:
        tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
        with torch.autocast(tensors[0].device.type, dtype=torch.bfloat16, enabled=autocast):
            losses = model.losses(*tensors)
        found = [torch.autograd.grad(loss, list(of.parameters())) for loss, of in losses]
        with torch.no_grad():
            for (_, of), grads in zip(losses, found, strict=True):
                for parameter, grad in zip(of.parameters(), grads, strict=True):
                    parameter -= model.rate * grad
        history.append(torch.stack([loss.detach().double() for loss, _ in losses]))
    return torch.stack(history)


@functools.cache
def prepare(make, width, size, batch, device):
    """A model, data for all steps, and the losses in float64."""
    torch.manual_seed(0)
    model, generator = make(width, size).to(device), torch.Generator().manual_seed(1)
    data = [[t.to(device) for t in model.data(batch, generator)] for _ in range(STEPS)]
    exact = train(model, data, dtype=torch.float64)
    assert (exact[-1] / exact[0] - 1).abs().max() > 0.02, "this training shows nothing"
    return model, data, exact


def check(prepared, precision, backends, memory_format=torch.contiguous_format):
    model, data, exact = prepared
    model = copy.deepcopy(model).to(memory_format=memory_format)
    data = [[t.contiguous(memory_format=memory_format) if t.is_floating_point() else t for t in ts] for ts in data]

    def error(**settings):
        with reference._precision(precision == "tf32"):
            losses = train(model, data, autocast=precision == "bf16", **settings)
        return ((losses - exact) / exact).abs().max().item()

    floors = {"fp32": reference.FLOORS[torch.float32], "tf32": reference.TF32_FLOOR, "bf16": 2.0**-8}
    own = error()
    allowed = max(2 * own, floors[precision])
    for backend in backends:
        found = error(ours=True, backend=backend)
        print(f"{precision}, {backend or 'eager'}: {found:.2e}, PyTorch {own:.2e}, allowed {allowed:.2e}")
        assert found <= allowed, f"{backend or 'eager'}: {found:.2e} from the reference, PyTorch {own:.2e}"


@pytest.fixture
def one_thread():
    """For networks so small, more of them only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("make", [Gan, Unet])
def test_losses_are_those_of_torch(make, one_thread):
    width, size, batch = (8, 16, 8) if make is Gan else (8, 8, 2)
    check(prepare(make, width, size, batch, "cpu"), "fp32", [None, "aot_eager"])


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("make", [Gan, Unet])
def test_losses_are_those_of_torch_on_a_gpu(make, precision, channels_last):
    width, batch, last = (64, 64, torch.channels_last) if make is Gan else (32, 4, torch.channels_last_3d)
    backends = [None, "inductor"] if precision == "bf16" and not channels_last else [None]
    memory_format = last if channels_last else torch.contiguous_format
    check(prepare(make, width, 16, batch, "cuda"), precision, backends, memory_format)
