"""torch.compile and torch.export: one graph for every size, PyTorch's settings, strides, and errors."""

import pytest
import torch
import torch.nn.functional as F

import fastconvt
from tests import reference

OPS = torch.ops.fastconvt
CHAIN = fastconvt.conv_transpose3d_logsumexp_hardswish


@pytest.fixture(autouse=True)
def forget_compiled():
    torch._dynamo.reset()


class Counting:
    """The backend "aot_eager", and the graphs that it was given."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def keywords(self, name):
        """The keyword-only arguments of the calls of our operator, in order."""
        ours = getattr(OPS, name)
        nodes = [node for graph in self.graphs for node in graph.graph.nodes]
        return [node.kwargs for node in nodes if node.target in (ours, ours.default)]


# Sizes that differ from each other and from those of the weights, or Dynamo takes them for the same symbol.
FUNCTIONS = {1: (fastconvt.conv_transpose1d, F.conv_transpose1d), 2: (fastconvt.conv_transpose2d, F.conv_transpose2d)}
FUNCTIONS[3] = (fastconvt.conv_transpose3d, F.conv_transpose3d)
GEOMETRY = {
    1: ((6, 5, 4), (3, 1, 2, 2, 1), [(7, 13), (9, 17), (11, 31)]),
    2: ((6, 5, 4, 3), ((2, 3), (1, 0), (0, 2), 2, (1, 2)), [(7, 13, 17), (9, 11, 23), (8, 19, 29)]),
    3: ((6, 5, 4, 3, 2), ((1, 2, 1), (1, 0, 2), (0, 1, 1), 3, (1, 2, 4)), [(7, 8, 9, 11), (9, 7, 8, 10)]),
}


class Convolution(torch.nn.Module):
    """One of FUNCTIONS with its weights; a module's sizes and numbers are constants of the graph."""

    def __init__(self, spatial):
        super().__init__()
        weight_shape, self.geometry, self.sizes = GEOMETRY[spatial]
        self.ours, self.torchs = FUNCTIONS[spatial]
        self.weight = torch.nn.Parameter(torch.randn(weight_shape))
        self.bias = torch.nn.Parameter(torch.randn(weight_shape[1] * self.geometry[3]))

    def forward(self, x):
        return self.ours(x, self.weight, self.bias, *self.geometry).sin()

    def by_torch(self, x):
        return self.torchs(x, self.weight, self.bias, *self.geometry).sin()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_one_graph_for_every_size_forward_and_backward(spatial, channels_last):
    if spatial == 1 and channels_last:
        pytest.skip("one layout in 1D")
    memory_format = {2: torch.channels_last, 3: torch.channels_last_3d}[spatial] if channels_last else None
    module, backend = Convolution(spatial), Counting()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for n, *size in module.sizes:
        x = torch.randn(n, module.weight.shape[0], *size)
        x = x.contiguous(memory_format=memory_format or torch.contiguous_format).requires_grad_()
        y, expected = compiled(x), module.by_torch(x)
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
        assert y.stride() == module(x).stride()
        leaves = (x, module.weight, module.bias)
        grads, expected_grads = (torch.autograd.grad(out.sum(), leaves) for out in (y, expected))
        torch.testing.assert_close(grads, expected_grads, atol=1e-3, rtol=1e-3)
    assert len(backend.graphs) == 1


def test_arguments_computed_from_sizes_do_not_specialise():
    backend = Counting()
    w = torch.randn(3, 2, 5, 5)

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def to_size(x, like):
        padding = [(x.shape[axis] - 1 + 5 - like.shape[axis]) // 2 for axis in (2, 3)]
        return fastconvt.conv_transpose2d(x, w, padding=padding)

    for height, width in ((11, 17), (13, 23), (19, 29)):
        size = (height + 2, width - 2)
        assert to_size(torch.randn(7, 3, height, width), torch.empty(1, 1, *size)).shape == (7, 2, *size)
    assert len(backend.graphs) == 1


def test_chain_forward_and_backward_compile_once():
    w, b = torch.randn(6, 5, 4, 3, 2, requires_grad=True), torch.randn(5, requires_grad=True)
    subtrahend = torch.tensor([0.1], requires_grad=True)
    leaves = (w, b, subtrahend)
    run = lambda x: CHAIN(x, w, b, subtrahend, 2, 1, min=-0.3).sin()  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for stance, (n, *size) in (("default", (7, 13, 8, 9)), ("fail_on_recompile", (9, 11, 10, 14))):
        x = torch.randn(n, 6, *size, requires_grad=True)
        with torch.compiler.set_stance(stance):
            y = compiled(x)
        expected = run(x)
        assert torch.equal(y, expected)
        grads, expected_grads = (torch.autograd.grad(out.sum(), (x, *leaves)) for out in (y, expected))
        torch.testing.assert_close(grads, expected_grads, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_inductor_forward_and_backward(channels_last):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(3, 16, 4, 5).contiguous(memory_format=memory_format).requires_grad_()
    w = torch.randn(16, 8, 3, 3, requires_grad=True)

    def decoder(x):
        x = fastconvt.conv_transpose2d(x, w, None, 2, 1, 1).relu()
        return fastconvt.conv_transpose2d(x[:, ::2].repeat(1, 4, 1, 1), w, None, (1, 2)) * 2

    y, expected = torch.compile(decoder, fullgraph=True)(x), decoder(x)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w)), torch.autograd.grad(expected.sum(), (x, w)))


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_an_output_of_no_size_is_an_error_in_both(spatial):
    x, w = torch.randn(1, 1, *[1] * spatial), torch.randn(1, 1, *[2] * spatial)
    function = lambda x: torch.sigmoid(FUNCTIONS[spatial][0](x, w, padding=1))  # noqa: E731
    for run in (function, torch.compile(function, backend="aot_eager"), torch.compile(function, backend="eager")):
        with torch.no_grad(), pytest.raises(RuntimeError, match="Output size is too small"):
            run(x)


class Layer(torch.nn.Module):
    def __init__(self, memory_format=torch.contiguous_format):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3, 2, 5).contiguous(memory_format=memory_format))
        self.bias = torch.nn.Parameter(torch.randn(6))

    def forward(self, x):
        return fastconvt.conv_transpose2d(x, self.weight, self.bias, (2, 1), groups=2)


class Unbacked(Layer):
    """The batch is a value: how many rows are positive."""

    def forward(self, x):
        return super().forward(x[(x[:, 0, 0, 0] > 0).nonzero()[:, 0]])


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_sizes(strict):
    layer = Layer()
    shapes = {"x": {0: torch.export.Dim("batch"), 2: torch.export.Dim("height"), 3: torch.export.Dim("width")}}
    program = torch.export.export(layer, (torch.randn(7, 4, 11, 13),), dynamic_shapes=shapes, strict=strict)
    for exported in (program, program.run_decompositions()):
        for shape in ((7, 4, 11, 13), (2, 4, 5, 17)):
            x = torch.randn(shape)
            assert torch.equal(exported.module()(x), layer(x))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_an_unbacked_batch(strict, memory_format):
    layer = Unbacked(memory_format)
    x = torch.randn(7, 4, 11, 13)
    program = torch.export.export(layer, (x,), strict=strict)
    for rows in (x, torch.randn(7, 4, 11, 13), x.abs(), -x.abs()):
        actual, expected = program.module()(rows), layer(rows)
        assert torch.equal(actual, expected) and actual.stride() == expected.stride()


def test_export_of_the_chain_with_an_unbacked_batch():
    class Chain(torch.nn.Module):
        def forward(self, x, w, s):
            return CHAIN(x[(x[:, 0, 0, 0, 0] > 0).nonzero()[:, 0]], w, None, s, 2)

    args = (torch.randn(7, 3, 4, 5, 6), torch.randn(3, 2, 2, 2, 2), torch.zeros(1))
    assert torch.equal(torch.export.export(Chain(), args).module()(*args), Chain()(*args))


def test_export_under_autocast():
    class Half(Layer):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    layer, x = Half(), torch.randn(3, 4, 7, 8)
    y = torch.export.export(layer, (x,)).module()(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, layer(x))


def test_values_of_the_layer_used_here():
    layer, x = Layer(), torch.randn(2, 4, 3, 5)
    with torch.no_grad():
        reference.assert_accurate(layer(x), x, layer.weight, layer.bias, (2, 1), 0, 0, 2)


@pytest.fixture
def precision():
    """PyTorch's settings of TF32; the test may change them."""
    yield torch.backends.cudnn
    restore_precision()


def restore_precision():
    torch.backends.fp32_precision = "none"
    torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = True  # and with it the newer settings of conv and rnn


def test_compiled_code_follows_allow_tf32(precision):
    backend = Counting()
    x, w = torch.randn(2, 3, 4, 5), torch.randn(3, 2, 3, 3)
    compiled = torch.compile(lambda x: fastconvt.conv_transpose2d(x, w), fullgraph=True, backend=backend)
    for allowed in (True, False, True):
        precision.allow_tf32 = allowed
        compiled(x)
    assert [keywords["allow_tf32"] for keywords in backend.keywords("conv_transpose2d")] == [True, False]


def test_compiled_code_after_only_the_newer_setting(precision):
    precision.conv.fp32_precision = "ieee"
    x, w = torch.randn(2, 3, 4, 5), torch.randn(3, 2, 3, 3)
    with pytest.raises(Exception, match="allow_tf32"):  # PyTorch's own: it cannot read the older setting
        torch.compile(lambda x: fastconvt.conv_transpose2d(x, w), fullgraph=True, backend="eager")(x)
    for allowed in (False, True):
        backend = Counting()
        run = lambda x, allowed=allowed: OPS.conv_transpose2d(x, w, allow_tf32=allowed)  # noqa: E731
        torch.compile(run, fullgraph=True, backend=backend)(x)
        assert backend.keywords("conv_transpose2d") == [{"allow_tf32": allowed}]
