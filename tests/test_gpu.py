"""What only a GPU can show: streams, graphs, devices, precision, sizes beyond 32 bits, memory."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastconvt
from tests import harness, reference
from tests.cases import BY_NAME, CASES, Case
from tests.illegal import CHAIN

pytestmark = [pytest.mark.gpu]
CUDA = torch.device("cuda")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LAYERS = [BY_NAME[name] for name in ("reference_2d", "reference_3d", "unet_k2_s2", "depthwise_k4_s2", "vocoder_k16_s8")]


def own_candidates(case, dtype=torch.float32, op=None):
    return [name for name in harness.candidates(case, dtype, CUDA, op=op) if name != "aten"]


def chain_arguments(case, dtype=torch.float32, device=CUDA):
    return (*case.tensors(dtype, device), torch.tensor([0.25], dtype=dtype, device=device))


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_runs_on_the_current_stream(case):
    """The producer of the input is slow and on the same stream: a kernel on another stream reads the old values."""
    x, w, b = case.tensors(device=CUDA)
    fresh, stream = x.clone(), torch.cuda.Stream()
    for name in harness.candidates(case, torch.float32, CUDA):
        for _ in range(5):
            x.fill_(torch.nan)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream), fastconvt.force(name):
                torch.cuda._sleep(20_000_000)
                x.copy_(fresh)
                y = harness.forward(case, x, w, b)
                grads = harness.backward(case, y, x, w)
            stream.synchronize()
            reference.assert_accurate(y, fresh, w, b, *case.args)
            reference.assert_gradients_accurate(grads, y, fresh, w, *case.args)


CAPTURE = """
import torch
import fastconvt
from tests import reference
from tests.test_gpu import BY_NAME, CHAIN, CUDA, chain_arguments

case = BY_NAME[{case!r}]
arguments = chain_arguments(case)
if not {chain}:
    arguments = arguments[:3]
op = getattr(torch.ops.fastconvt, CHAIN if {chain} else case.op)
graph = torch.cuda.CUDAGraph()
with fastconvt.force({name!r}), torch.cuda.graph(graph):
    y = op(*arguments, *case.args)
arguments[0].mul_(-0.5)
graph.replay()
torch.cuda.synchronize()
check = reference.assert_chain_accurate if {chain} else reference.assert_accurate
check(y, *arguments, *case.args)
"""


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_graph_capture_as_the_first_call_of_a_process(case, chain):
    """Nothing synchronises, allocates lazily or loads a module lazily."""
    if chain and case.ndim != 3:
        pytest.skip("the chain is 3D")
    folder, processes = Path(__file__).parent.parent, {}
    for name in own_candidates(case, op=CHAIN if chain else None):
        command = [sys.executable, "-c", CAPTURE.format(case=case.name, chain=chain, name=name)]
        processes[name] = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    for name, process in processes.items():
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, f"{name}: {errors[-3000:]}"


@TWO_GPUS
@pytest.mark.parametrize("current", [0, 1])
def test_runs_on_the_device_of_its_tensors(current):
    other = 1 - current
    with torch.cuda.device(current):
        for case in LAYERS:
            x, w, b = case.tensors(device=f"cuda:{other}")
            for name in harness.candidates(case, torch.float32, f"cuda:{other}"):
                before = torch.cuda.memory_allocated(current)
                with fastconvt.force(name):
                    y = harness.forward(case, x, w, b)
                    grads = harness.backward(case, y, x, w)
                assert y.device == x.device and torch.cuda.current_device() == current
                assert torch.cuda.memory_allocated(current) == before, name
                reference.assert_accurate(y, x, w, b, *case.args)
                reference.assert_gradients_accurate(grads, y, x, w, *case.args)
        case = BY_NAME["reference_3d"]
        arguments = chain_arguments(case, device=f"cuda:{other}")
        reference.assert_chain_accurate(
            getattr(torch.ops.fastconvt, CHAIN)(*arguments, *case.args), *arguments, *case.args
        )


@TWO_GPUS
@pytest.mark.parametrize("which", [0, 1, 2])
def test_tensors_on_two_devices_are_refused(which):
    case = BY_NAME["reference_3d"]
    tensors = list(case.tensors(device=CUDA))
    for device in ("cpu", "cuda:1"):
        mixed = [t.to(device) if i == which else t for i, t in enumerate(tensors)]
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            harness.forward(case, *mixed)


@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("global_flag", [False, True])
def test_precision_is_the_operators_own(allow_tf32, global_flag):
    """Forward and gradients: strict whatever the global flag says, TF32 only where it is allowed."""
    case = Case("", (2, 256, 16, 16), (256, 128, 4, 4), 2, 1)
    x, w, b = case.tensors(device=CUDA)
    grad = case.grad_output(device=CUDA)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=global_flag):
        for name in harness.candidates(case, torch.float32, CUDA):
            with fastconvt.force(name):
                y = harness.forward(case, x, w, b, allow_tf32=allow_tf32)
                grads = harness.backward(case, grad, x, w, allow_tf32=allow_tf32)
            reference.assert_accurate(y, x, w, b, *case.args, tf32=allow_tf32)
            reference.assert_gradients_accurate(grads, grad, x, w, *case.args, tf32=allow_tf32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_candidate_where_tf32_is_allowed(case):
    tensors = case.tensors(device=CUDA)
    call = functools.partial(harness.forward, case, *tensors, allow_tf32=True)
    outputs = harness.on_every_candidate(case, call, torch.float32, CUDA, tf32=True)
    harness.check_every(outputs, reference.output_rule(*tensors, *case.args, tf32=True))
    if case.ndim == 3 and case.output[-4] > 0:
        tensors = *tensors, torch.tensor([0.25], device=CUDA)
        call = functools.partial(getattr(torch.ops.fastconvt, CHAIN), *tensors, *case.args, allow_tf32=True)
        outputs = harness.on_every_candidate(case, call, torch.float32, CUDA, op=CHAIN, tf32=True)
        harness.check_every(outputs, reference.chain_rule(*tensors, *case.args, tf32=True))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_where_tf32_is_allowed(case, channels_last):
    if channels_last and (case.ndim == 1 or not case.batched):
        pytest.skip("one layout")
    x, w, _ = case.tensors(device=CUDA, channels_last=(channels_last, channels_last))
    grad = case.grad_output(device=CUDA)
    rule = reference.gradients_rule(grad, x, w, *case.args, tf32=True)
    call = functools.partial(harness.backward, case, grad, x, w, allow_tf32=True)
    last = harness.is_channels_last(x) or harness.is_channels_last(w)  # sizes of 1 may leave it open
    for _, grads in harness.on_every_gradient(case, call, torch.float32, CUDA, channels_last=last, tf32=True):
        rule(grads)


@pytest.mark.parametrize("setting", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_derivatives_on_every_gradient(case, setting):
    """What gradgradcheck says in float64, of the candidates that do not take it."""
    dtype, tf32 = torch.bfloat16 if setting == "bfloat16" else torch.float32, setting == "tf32"
    x, w, _ = case.tensors(dtype, CUDA)
    grad, factors = case.grad_output(dtype, CUDA), case.tensors(dtype, CUDA, seed=2)
    for which, op in ((0, "input"), (1, "weight")):
        for name in harness.candidates(case, dtype, CUDA, f"{case.op}_{op}_gradient", tf32=tf32):
            with fastconvt.force(name):
                harness.check_second_derivatives(case, grad, x, w, which, factors[which], tf32)


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_same_bits_beside_a_busy_stream(case):
    x, w, b = case.tensors(device=CUDA)
    grad = case.grad_output(device=CUDA)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=CUDA)
    # PyTorch's own kernels are not asked for that here.
    for name in own_candidates(case, torch.float32):
        with fastconvt.force(name):
            first = harness.forward(case, x, w, b), *harness.backward(case, grad, x, w)
            for _ in range(20):
                with torch.cuda.stream(busy):
                    noise @ noise
                again = harness.forward(case, x, w, b), *harness.backward(case, grad, x, w)
                assert all(map(torch.equal, first, again)), name


def random_positions(shape, count=2000):
    """Random elements of a tensor of this shape, and the last one."""
    generator = torch.Generator().manual_seed(7)
    index = torch.stack([torch.randint(n, (count,), generator=generator) for n in shape], 1)
    index[0] = torch.tensor(shape) - 1
    return index


HUGE = {
    "one sample beyond 2^31 inputs": (torch.float16, Case("", (1, 514, 2048, 2048), (514, 1, 3, 3), 1, 1)),
    "one sample beyond 2^31 outputs": (torch.float16, Case("", (1, 2, 4096, 8192), (2, 17, 2, 2), 2)),
    "a batch beyond 2^31 outputs": (torch.bfloat16, Case("", (70, 1, 2048, 2048), (1, 2, 2, 2), 2)),
    "columns beyond 32 bits": (torch.float32, Case("", (1, 64, 8, 128, 172), (64, 128, 5, 5, 5), 2, 2, 1)),
    "bfloat16 in 3D": (torch.bfloat16, Case("", (1, 16, 124, 1282, 722), (16, 16, 1, 3, 3), 1, (0, 1, 1))),
    "float16 with 27 taps": (torch.float16, Case("", (1, 256, 19, 146, 258), (256, 8, 3, 3, 3), 1, 1)),
}


@pytest.mark.parametrize("name", HUGE)
def test_beyond_32_bits(name):
    dtype, case = HUGE[name]
    torch.cuda.empty_cache()
    generator = torch.Generator(CUDA).manual_seed(3)
    x = torch.rand(case.input, device=CUDA, dtype=dtype, generator=generator)
    _, w, b = Case("", (1, *case.weight[:1], *[1] * case.ndim), case.weight, groups=case.groups).tensors(dtype, CUDA)
    index = random_positions(case.output).to(CUDA)
    expected = reference.conv_transpose_at(index, x, w, b, *case.args)
    scale = reference.conv_transpose_at(index, x.abs_(), w.abs(), b.abs(), *case.args)
    for candidate in own_candidates(case, dtype):
        harness.poison_cuda_cache(megabytes=1024)
        with fastconvt.force(candidate):
            y = harness.forward(case, x, w, b)
        assert y.shape == case.output and y.isfinite().all(), candidate
        error = ((y[tuple(index.T)].double() - expected).abs() / scale).max().item()
        assert error <= reference.floor(dtype), f"{candidate}: {error}"


def test_sum_of_ones_beyond_32_bits():
    case = Case("", (1, 514, 2048, 2048), (514, 1, 3, 3), 1, 1, bias=False)
    x, w = (torch.ones(shape, dtype=torch.float16, device=CUDA) for shape in (case.input, case.weight))
    for candidate in own_candidates(case, torch.float16):
        with fastconvt.force(candidate):
            y = harness.forward(case, x, w, None)
        assert (y[0, 0, 1:-1, 1:-1] == 4624).all(), candidate  # 514 * 9 = 4626, a tie that goes to the even one
        assert y[0, 0, 0, 0] == y[0, 0, -1, -1] == 514 * 4, candidate


MEMORY = [
    Case("", (32, 2048, 8, 8), (2048, 512, 4, 4), 2, 1),
    Case("", (1, 256, 16, 64, 64), (256, 64, 2, 2, 2), 2),
    Case("", (1, 64, 4, 545, 961), (64, 32, 2, 2, 2), 2),
    Case("", (16, 32, 128, 256), (32, 16, 3, 5), (2, 3), (1, 2), 0, 4, (2, 1)),
]


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: "x".join(map(str, case.input)))
def test_memory_beyond_the_output(case):
    """Our own kernels need no columns and no copy of the input: at most the packed weight and a little. One packs a
    contiguous input, too, with channels in whole vectors, and one aligns rows of its planes."""
    x, w, b = case.tensors(torch.bfloat16, CUDA)
    for name in own_candidates(case, torch.bfloat16):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with fastconvt.force(name):
            y = harness.forward(case, x, w, b)
        extra = torch.cuda.max_memory_allocated() - before - y.nbytes
        packed = 2 * x.nbytes if name in ("phase_tma", "shuffle_gemm") else 0
        assert extra <= 2 * w.nbytes + packed + (1 << 20), f"{name}: {extra / 2**20:.1f} MiB"


GRADIENTS_MEMORY = [  # with what they may hold beyond the gradients, for a byte of the output's
    (Case("", (8, 64, 300, 401), (64, 64, 3, 3), bias=False), torch.float32, 0),
    (Case("", (80, 64, 96, 96), (64, 64, 3, 3), bias=False), torch.float32, 0),
    (Case("", (16, 32, 16, 32, 64), (32, 16, 3, 5, 7), bias=False), torch.bfloat16, 1.5),
    (Case("", (1, 256, 64, 64), (256, 128, 3, 3), 2, 1, 1, bias=False), torch.bfloat16, 1.64),
]


@pytest.mark.parametrize(
    ("case", "dtype", "share"), GRADIENTS_MEMORY, ids=["in_place", "small_planes", "beside", "halves"]
)
def test_memory_beyond_the_gradients(case, dtype, share):
    """What packs weights without strides does so where results will be; so does a sum for the other gradient."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs have other kernels for these layers")
    x, w, _ = case.tensors(dtype, CUDA)
    grad = case.grad_output(dtype, CUDA)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = harness.backward(case, grad, x, w, (True, True, False))[:2]
    extra = torch.cuda.max_memory_allocated() - before - sum(found.nbytes for found in grads)
    assert extra <= share * grad.nbytes + 4096, f"{extra / 1e6:.3f} MB"
    reference.gradients_rule(grad, x, w, *case.args)([*grads, None])


def test_memory_of_the_chain_at_the_reference_size():
    case = Case("", (128, 3, 16, 32, 32), (3, 16, 3, 3, 3), 2, 1)
    arguments = chain_arguments(case)
    op = getattr(torch.ops.fastconvt, CHAIN)
    for name in own_candidates(case, op=CHAIN):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with fastconvt.force(name):
            y = op(*arguments, *case.args)
            extra = torch.cuda.max_memory_allocated() - before - y.nbytes
            assert extra <= 8 << 20, f"{name}: {extra / 2**20:.1f} MiB"
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            backward = getattr(torch.ops.fastconvt, f"{CHAIN}_backward")
            grads = backward(torch.ones_like(y), *arguments, *case.args, [True] * 4)
            extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
            assert extra <= 300e6, f"{name}: {extra / 1e6:.0f} MB"


def test_compiled_with_graphs():
    """mode="reduce-overhead" captures what the operator launches."""
    for case in LAYERS:
        torch._dynamo.reset()
        x, w, b = case.tensors(device=CUDA)
        geometry = case.args
        compiled = torch.compile(getattr(fastconvt, case.op), mode="reduce-overhead", fullgraph=True)
        for factor in (1.0, -0.5, 2.0, 0.25):
            y = compiled(x * factor, w, b, *geometry).clone()
            reference.assert_accurate(y, x * factor, w, b, *geometry, tf32=torch.backends.cudnn.allow_tf32)


def test_autotune_measures_once_and_keeps_the_fastest(tmp_path):
    """Forward, both gradients and the chain; the values are the chosen candidate's, and the next measures nothing."""
    case, chain = BY_NAME["reference_2d"], BY_NAME["reference_3d"]
    x, w, b = case.tensors(device=CUDA)
    arguments = chain_arguments(chain)
    op = getattr(torch.ops.fastconvt, CHAIN)

    def run_all():
        y = harness.forward(case, x, w, b)
        grads = harness.backward(case, y, x, w)
        reference.assert_accurate(y, x, w, b, *case.args)
        reference.assert_gradients_accurate(grads, y, x, w, *case.args)
        z = op(*arguments, *chain.args)
        getattr(torch.ops.fastconvt, f"{CHAIN}_backward")(z, *arguments, *chain.args, [True] * 4)

    with fastconvt.autotune(tmp_path):
        run_all()
        (file,) = tmp_path.iterdir()
        lines = file.read_text().splitlines()
        operations = {"forward", "input_gradient", "weight_gradient"}
        operations |= {"logsumexp_hardswish", "logsumexp_hardswish_backward"}
        assert {line.split()[0] for line in lines} == operations, lines
        run_all()
    run_all()
    assert file.read_text().splitlines() == lines
    for line in lines:
        _, fastest, *rest = line.split("\t")
        times = {name: float(ms) for name, ms in zip(rest[::2], rest[1::2], strict=True)}
        assert times[fastest] <= 1.04 * min(times.values()), line
    stride, padding, output_padding, groups, dilation = case.args
    geometry = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    plan = fastconvt.plan(case.op, x.shape, w.shape, bias=b is not None, groups=groups, **geometry, device="cuda")
    assert plan["choice"] == lines[0].split("\t")[1]


def test_autotune_measures_nothing_in_a_graph(tmp_path):
    case = BY_NAME["unet_k2_s2"]
    x, w, b = case.tensors(torch.float16, CUDA)
    graph = torch.cuda.CUDAGraph()
    harness.forward(case, x, w, b)
    with fastconvt.autotune(tmp_path), torch.cuda.graph(graph):
        y = harness.forward(case, x, w, b)
    graph.replay()
    assert not list(tmp_path.iterdir())
    reference.assert_accurate(y, x, w, b, *case.args)
