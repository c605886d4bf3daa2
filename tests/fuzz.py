"""``python -m tests.fuzz --seconds N --device cpu|cuda --seed S``: random problems against the float64 oracle.

Each problem is legal in three of four draws: every axis, dtype, layout and stride pattern, views that start off
alignment, on every candidate of the plan, forward and backward, the fused chain among them, in memory full of NaN. The
others are illegal and must raise RuntimeError. A problem depends on the seed and its number alone; a failure prints the
command that repeats it, and so does the death of the process.
"""

import argparse
import functools
import multiprocessing
import random
import sys
import time
import traceback
import warnings

import torch

from tests import harness, reference
from tests.cases import DTYPES, draw_case, draw_relative, to_channels_last
from tests.illegal import CHAIN, draw_call

MAX_FAILURES = 20  # then it stops: they have one cause, most likely
DONE, LEGAL, FAILURES = range(3)
BOUNDS = {"min": -0.4, "max": 0.6}


def make_view(source, tensor):
    """The tensor with strides of another kind; some kinds change its values as well."""
    kinds = [lambda t: t, to_channels_last, *harness.VIEWS]
    return source.choices(kinds, weights=[6, 3] + [1] * len(harness.VIEWS))[0](tensor)


def sprinkle(source, tensor):
    """Put inf, -inf, NaN or huge values at a few places of the tensor."""
    flat = tensor.view(-1)
    for _ in range(source.randint(1, 3)):
        flat[source.randrange(flat.numel())] = source.choice((torch.inf, -torch.inf, torch.nan, 3e4))


def legal_problem(source, device, relatives):
    """A description of the problem, and a function that runs it."""
    case = (draw_relative if relatives else draw_case)(source.randint)
    dtype = source.choices(DTYPES, weights=[4, 1, 2, 2])[0]
    x, w, b = case.tensors(dtype, device, seed=source.getrandbits(32))
    special = relatives and source.random() < 0.15
    if special:
        sprinkle(source, source.choice((x, w)))
    x, w = make_view(source, x), make_view(source, w)
    b = None if b is None else make_view(source, b)
    grad = make_view(source, case.grad_output(dtype, device, seed=source.getrandbits(32)))
    chain = case.ndim == 3 and source.random() < (0.6 if relatives else 0.4)
    tf32 = dtype == torch.float32 and device != "cpu" and source.random() < 0.3
    strides = {"input": x.stride(), "weight": w.stride(), "grad_output": grad.stride()}
    # cuDNN searches for its algorithm at each new shape, which takes longer than all the rest.
    skip = ("aten",) if (device != "cpu" and source.random() < 0.9) or special else ()
    run = run_chain if chain else run_convolution
    name = f"{'chain of ' * chain}{case}: {case!r} {'tf32 ' * tf32}{dtype} {strides}"
    if not chain and source.random() < 0.3:
        activation, alpha = source.choice(list(reference.ACTIVATIONS)), source.choice((0.01, -0.5, 0.0))
        run = functools.partial(run_activation, activation=activation, alpha=alpha)
        name = f"{activation}({alpha}) of {name}"
    return name, lambda: run(case, x, w, b, grad, device, tf32, skip)


def run_activation(case, x, w, b, _, device, tf32, skip, activation, alpha):
    last = harness.is_channels_last(x if case.batched else x[None]) or harness.is_channels_last(w)
    call = functools.partial(harness.forward_act, case, x, w, b, activation, alpha, allow_tf32=tf32)
    outputs = harness.on_every_candidate(case, call, x.dtype, device, channels_last=last, tf32=tf32, skip=skip)
    harness.check_every(outputs, reference.activation_rule(activation, alpha, x, w, b, *case.args, tf32=tf32))


def run_convolution(case, x, w, b, grad, device, tf32, skip):
    last = harness.is_channels_last(x if case.batched else x[None]) or harness.is_channels_last(w)
    options = {"channels_last": last, "tf32": tf32, "skip": skip}
    call = functools.partial(harness.forward, case, x, w, b, allow_tf32=tf32)
    outputs = list(harness.on_every_candidate(case, call, x.dtype, device, **options))
    harness.check_every(outputs, reference.output_rule(x, w, b, *case.args, tf32=tf32))
    strides = harness.expected_strides(case, x, w)
    outputs.append(("fake", harness.forward(case, *map(to_meta, (x, w, b)))))
    for name, y in outputs:
        assert y.stride() == strides, f"{name}: strides {y.stride()}, not {strides}"
    rule = reference.gradients_rule(grad, x, w, *case.args, tf32=tf32)
    call = functools.partial(harness.backward, case, grad, x, w, allow_tf32=tf32)
    for name, grads in harness.on_every_gradient(case, call, x.dtype, device, **options):
        check(name, rule, grads)


def check(name, rule, values):
    try:
        rule(values)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def to_meta(tensor):
    """A tensor of the same strides without memory."""
    if tensor is None:
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def run_chain(case, x, w, b, grad, device, tf32, skip):
    arguments = x, w, b, torch.full((1,), 0.25, dtype=x.dtype, device=device)
    call = functools.partial(getattr(torch.ops.fastconvt, CHAIN), *arguments, *case.args, **BOUNDS, allow_tf32=tf32)
    outputs = harness.on_every_candidate(case, call, x.dtype, device, op=CHAIN, tf32=tf32, skip=skip)
    harness.check_every(outputs, reference.chain_rule(*arguments, *case.args, **BOUNDS, tf32=tf32))
    if not (x.isfinite().all() and w.isfinite().all()):
        return
    grad = reference.away_from_bounds(grad.narrow(-4, 0, 1), *arguments, *case.args, **BOUNDS)
    mask = [True, True, b is not None, True]
    rule = reference.chain_gradients_rule(grad, *arguments, *case.args, **BOUNDS)
    op = f"{CHAIN}_backward"
    call = functools.partial(getattr(torch.ops.fastconvt, op), grad, *arguments, *case.args, mask, **BOUNDS)
    for name, grads in harness.on_every_candidate(case, call, x.dtype, device, op=op, skip=skip):
        check(name, rule, [g if asked else None for g, asked in zip(grads, mask, strict=True)])


def illegal_problem(source, device):
    call = draw_call(source.randint)

    def run():
        try:
            getattr(torch.ops.fastconvt, call.op)(*call.make(device))
        except RuntimeError as error:
            assert str(error).startswith(f"{call.op}: "), f"an unexpected text: {error}"
        else:
            raise AssertionError("an illegal call was accepted")

    return f"illegal {call}", run


def run_problem(seed, number, device, relatives):
    """Whether the problem was legal; what it raises is the failure."""
    source = random.Random(f"{seed}-{number}")
    legal = relatives or source.random() < 0.75
    description, run = legal_problem(source, device, relatives) if legal else illegal_problem(source, device)
    try:
        run()
    except Exception as error:
        error.add_note(description) if hasattr(error, "add_note") else print(description)
        raise
    return legal


def parse_arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n\n")[1])
    parser.add_argument("--seconds", type=float, default=60, help="stop after so long (default 60)")
    parser.add_argument("--problems", type=int, default=sys.maxsize, help="or after so many problems")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--relatives",
        action="store_true",
        help="relatives of the reference layers, depthwise layers and heads only, legal ones",
    )
    parser.add_argument("--first", type=int, default=0, help="the number of the first problem")
    return parser.parse_args()


def run_problems(options, start, counts):
    """Run problems until time, number or failures are used up; `counts` tells the watching process how far it came."""
    kind = "--relatives " * options.relatives
    again = f"python -m tests.fuzz {kind}--device {options.device} --seed {options.seed} --problems 1 --first"
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    shown = time.monotonic()
    with harness.poisoned_memory(options.device):
        while counts[DONE] < options.problems and counts[FAILURES] < MAX_FAILURES:
            if time.monotonic() - start > options.seconds:
                break
            number = options.first + counts[DONE]
            counts[DONE] += 1
            try:
                counts[LEGAL] += run_problem(options.seed, number, options.device, options.relatives)
            except Exception:
                counts[FAILURES] += 1
                traceback.print_exc()
                print(f"FAILED, repeat with: {again} {number}", flush=True)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(f"{counts[DONE]} problems in {shown - start:.0f} s, {counts[FAILURES]} failures", flush=True)


def main():
    options = parse_arguments()
    start, context = time.monotonic(), multiprocessing.get_context("spawn")
    counts = context.Array("q", 3, lock=False)
    # Another process runs the problems; where it dies, by a fault of memory for instance, a new one goes on.
    while True:
        worker = context.Process(target=run_problems, args=(options, start, counts))
        worker.start()
        worker.join()
        if worker.exitcode == 0:
            break
        counts[FAILURES] += 1
        last = options.first + counts[DONE] - 1
        print(
            f"DIED with {worker.exitcode} in problem {last} of seed {options.seed}, or through one before it",
            flush=True,
        )
        if counts[DONE] == 0:
            break
    illegal = counts[DONE] - counts[LEGAL] - counts[FAILURES]
    totals = f"{counts[DONE]} problems, {illegal} illegal, {counts[FAILURES]} failures"
    print(f"{totals} (seed {options.seed}, {time.monotonic() - start:.0f} s)")
    return 1 if counts[FAILURES] else 0


if __name__ == "__main__":
    sys.exit(main())
