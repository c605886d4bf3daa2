"""The examples do what they say."""

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = load("reference_models")
# A batch of 1 keeps the test light; the other sizes are the reference layers' own.
PAIRS = [pytest.param(*pair, id=name) for name, pair in models.PAIRS.items()]


def make_pair(plain_class, fast_class, device, **arguments):
    """Both modules with the same parameters; the weights are scaled so that the outputs span more than a hair."""
    torch.manual_seed(0)
    plain = plain_class(**arguments).to(device)
    fast = fast_class(**arguments).to(device)
    with torch.no_grad():
        plain.conv.weight.mul_(4)
        if hasattr(plain, "subtrahend"):
            plain.subtrahend.fill_(0.25)
    fast.load_state_dict(plain.state_dict(), strict=True)
    return plain, fast


@pytest.mark.parametrize(("plain_class", "fast_class", "shape"), PAIRS)
def test_pairs_agree(plain_class, fast_class, shape, device):
    plain, fast = make_pair(plain_class, fast_class, device)
    x = torch.randn(1, *shape[1:], device=device)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.testing.assert_close(fast(x), plain(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("plain_class", "fast_class", "shape"), PAIRS)
def test_parameters_load_both_ways(plain_class, fast_class, shape):
    plain, fast = plain_class(), fast_class()
    fast.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(fast.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fast.parameters(), strict=True))


@pytest.mark.parametrize(
    ("plain_class", "fast_class", "arguments", "shape"),
    [
        (
            models.Upsample2d,
            models.FastUpsample2d,
            {
                "in_channels": 6,
                "out_channels": 4,
                "kernel_size": 4,
                "stride": 2,
                "padding": 1,
                "groups": 2,
                "bias": True,
            },
            (2, 6, 5, 7),
        ),
        (
            models.Upsample3dChain,
            models.FastUpsample3dChain,
            {"in_channels": 2, "out_channels": 5, "kernel_size": (2, 3, 4), "stride": (1, 2, 3), "padding": (0, 1, 1)},
            (2, 2, 3, 4, 5),
        ),
    ],
)
def test_gradients_agree(plain_class, fast_class, arguments, shape):
    plain, fast = make_pair(
        plain_class, fast_class, "cpu", **{"dilation": 1, **arguments} if len(shape) == 4 else arguments
    )
    x = torch.randn(shape)
    upstream = torch.randn_like(plain(x))
    gradients = []
    for module in (plain, fast):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(module(leaf), [leaf, *module.parameters()], upstream))
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_photo_is_enlarged(tmp_path, capsys):
    io = pytest.importorskip("skimage.io")
    load("upsample_photo").main(["--factor", "3", "--crop", "40", "--device", "cpu", "--out", str(tmp_path)])
    assert io.imread(tmp_path / "photo-fastconvt.png").shape == (120, 120, 3)
    assert (io.imread(tmp_path / "photo-difference.png").shape) == (120, 120, 3)
    ours, theirs = (io.imread(tmp_path / f"photo-{name}.png").astype(int) for name in ("fastconvt", "pytorch"))
    assert ours.std() > 10
    assert abs(ours - theirs).max() <= 1
    assert "largest difference" in capsys.readouterr().out
