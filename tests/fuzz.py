"""``python -m tests.fuzz --seconds N --device cpu|cuda --seed S``: random problems against the float64 oracle.

Each problem is legal in three of four draws: every axis, dtype, layout and stride pattern, views that start off
alignment, on every candidate of the plan, forward and backward, the fused chain and activations among them, in memory
full of NaN. Gradients are asked for by every mask; some are differentiated again, and forward mode must be right or
raise. The others are illegal and must raise RuntimeError. A problem depends on the seed and its number alone; a failure
prints the command that repeats it, and so does the death of the process.
"""

import argparse
import collections
import functools
import itertools
import multiprocessing
import random
import sys
import time
import traceback
import warnings

import torch

from tests import harness, reference
from tests.cases import DTYPES, draw_case, draw_layer, draw_relative, to_channels_last
from tests.illegal import CHAIN, draw_call

MAX_FAILURES = 20  # then it stops: they have one cause, most likely
DONE, LEGAL, FAILURES = range(3)
KINDS = {
    "relatives": "relatives of the reference layers, depthwise layers and heads only, legal ones",
    "gradients": "legal problems of every kind, layers of networks among them, and no forward but of activations",
}
MASKS = [mask for mask in itertools.product((True, False), repeat=3) if any(mask)]
TALLY = collections.Counter()  # what this process has checked
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


def legal_problem(source, device, kind):
    """A description of the problem, and a function that runs it."""
    draws = {"relatives": [draw_relative], "gradients": [draw_case, draw_relative, draw_layer]}.get(kind, [draw_case])
    case = source.choice(draws)(source.randint)
    relatives = kind == "relatives"
    dtype = source.choices(DTYPES, weights=[4, 1, 2, 2])[0]
    x, w, b = case.tensors(dtype, device, seed=source.getrandbits(32))
    special = relatives and source.random() < 0.15
    if special:
        sprinkle(source, source.choice((x, w)))
    x, w = make_view(source, x), make_view(source, w)
    b = None if b is None else make_view(source, b)
    grad = make_view(source, case.grad_output(dtype, device, seed=source.getrandbits(32)))
    mask = source.choices(MASKS, weights=[len(MASKS)] + [1] * (len(MASKS) - 1))[0]
    chain = case.ndim == 3 and kind != "gradients" and source.random() < (0.6 if relatives else 0.4)
    tf32 = dtype == torch.float32 and device != "cpu" and source.random() < 0.3
    strides = {"input": x.stride(), "weight": w.stride(), "grad_output": grad.stride()}
    # cuDNN searches for its algorithm at each new shape, which takes longer than all the rest.
    skip = ("aten",) if (device != "cpu" and source.random() < 0.9) or special else ()
    name = f"{'chain of ' * chain}{case}: {case!r} {'tf32 ' * tf32}{dtype} {strides}, {mask}"
    if chain:
        return name, lambda: run_chain(case, x, w, b, grad, device, tf32, skip, mask)
    last = harness.is_channels_last(x if case.batched else x[None]) or harness.is_channels_last(w)
    options = {"channels_last": last, "tf32": tf32, "skip": skip}
    steps = [run_gradients] if kind == "gradients" else [run_forward, run_gradients]
    if source.random() < 0.3:
        activation, alpha = source.choice(list(reference.ACTIVATIONS)), source.choice((0.01, -0.5, 0.0))
        name = f"{activation}({alpha}) of {name}"
        steps = [functools.partial(run_activation, activation=activation, alpha=alpha, gradients=not special)]
    elif not special and source.random() < 0.3:
        steps.append(functools.partial(run_second, which=source.randrange(3), seed=source.getrandbits(32)))
        steps.append(run_forward_mode)
    return name, lambda: [step(case, (x, w, b), grad, mask, device, options) for step in steps]


def run_forward(case, tensors, grad, mask, device, options):
    x, w, b = tensors
    tf32 = options["tf32"]
    call = functools.partial(harness.forward, case, x, w, b, allow_tf32=tf32)
    outputs = list(harness.on_every_candidate(case, call, x.dtype, device, **options))
    harness.check_every(outputs, reference.output_rule(x, w, b, *case.args, tf32=tf32))
    strides = harness.expected_strides(case, x, w)
    outputs.append(("fake", harness.forward(case, *map(to_meta, (x, w, b)))))
    for name, y in outputs:
        assert y.stride() == strides, f"{name}: strides {y.stride()}, not {strides}"
    TALLY["forward"] += 1


def run_gradients(case, tensors, grad, mask, device, options):
    """Both gradients on every candidate, as the mask asks; the weight's has the weight's layout."""
    x, w, _ = tensors
    rule = reference.gradients_rule(grad, x, w, *case.args, tf32=options["tf32"])
    call = functools.partial(harness.backward, case, grad, x, w, mask, allow_tf32=options["tf32"])
    strides = torch.empty_like(w).stride()
    for name, grads in harness.on_every_gradient(case, call, x.dtype, device, **options):
        for found, asked in zip(grads, mask, strict=True):
            assert asked or found is None or found.shape == (0,), f"{name}: a gradient that was not asked for"
        grads = [found if asked else None for found, asked in zip(grads, mask, strict=True)]
        check(name, rule, grads)
        assert grads[1] is None or grads[1].stride() == strides, f"{name}: strides {grads[1].stride()}, not {strides}"
        if any(found is not None for found in grads):
            TALLY[name] += 1
    TALLY["gradients"] += 1
    TALLY["partial masks"] += not all(mask)


def run_second(case, tensors, grad, mask, device, options, which, seed):
    shape = (tensors[0].shape, tensors[1].shape, (case.out_channels,))[which]
    factor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(grad)
    harness.check_second_derivatives(case, grad, *tensors[:2], which, factor, options["tf32"])
    TALLY["second derivatives"] += 1


def run_forward_mode(case, tensors, grad, mask, device, options):
    """The tangent is right, or there is none."""
    x, w, b = tensors
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x)
    call = functools.partial(harness.forward, case, weight=w, bias=b, allow_tf32=options["tf32"])
    TALLY["forward mode"] += 1
    try:
        _, found = torch.func.jvp(call, (x.contiguous(),), (tangent,))
    except RuntimeError as error:
        assert "has no forward-mode derivative" in str(error), error
        return
    reference.output_rule(tangent, w, None, *case.args, tf32=options["tf32"])([found])


def run_activation(case, tensors, grad, mask, device, options, activation, alpha, gradients):
    """Every candidate, and the gradients of the plan's choice: the convolution's, after the activation's by ATen."""
    x, w, b = tensors
    tf32 = options["tf32"]
    call = functools.partial(harness.forward_act, case, x, w, b, activation, alpha, allow_tf32=tf32)
    outputs = harness.on_every_candidate(case, call, x.dtype, device, **options)
    harness.check_every(outputs, reference.activation_rule(activation, alpha, x, w, b, *case.args, tf32=tf32))
    TALLY["activations"] += 1
    if not gradients:
        return
    leaves = [None if t is None else t.detach().requires_grad_(asked) for t, asked in zip(tensors, mask, strict=True)]
    asked = [t for t in leaves if t is not None and t.requires_grad]
    if not asked:
        return
    y = harness.forward_act(case, *leaves, activation, alpha, allow_tf32=tf32)
    conv = harness.forward(case, x, w, b, allow_tf32=tf32)
    through = functools.partial(reference.activation_gradient, activation, alpha, conv=conv, output=y.detach())
    grad = reference.away_from_underflow(grad, through(grad))
    found = iter(torch.autograd.grad(y, asked, grad))
    rule = reference.gradients_rule(through(grad), x, w, *case.args, tf32=tf32)
    rule([next(found) if t is not None and t.requires_grad else None for t in leaves])
    TALLY["gradients through activations"] += 1


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


def run_chain(case, x, w, b, grad, device, tf32, skip, mask):
    arguments = x, w, b, torch.full((1,), 0.25, dtype=x.dtype, device=device)
    call = functools.partial(getattr(torch.ops.fastconvt, CHAIN), *arguments, *case.args, **BOUNDS, allow_tf32=tf32)
    outputs = harness.on_every_candidate(case, call, x.dtype, device, op=CHAIN, tf32=tf32, skip=skip)
    harness.check_every(outputs, reference.chain_rule(*arguments, *case.args, **BOUNDS, tf32=tf32))
    if not (x.isfinite().all() and w.isfinite().all()):
        return
    grad = reference.away_from_bounds(grad.narrow(-4, 0, 1), *arguments, *case.args, **BOUNDS)
    mask = [*mask[:2], mask[2] and b is not None, True]
    rule = reference.chain_gradients_rule(grad, *arguments, *case.args, **BOUNDS)
    op = f"{CHAIN}_backward"
    call = functools.partial(getattr(torch.ops.fastconvt, op), grad, *arguments, *case.args, mask, **BOUNDS)
    for name, grads in harness.on_every_candidate(case, call, x.dtype, device, op=op, skip=skip):
        check(name, rule, [g if asked else None for g, asked in zip(grads, mask, strict=True)])
        TALLY[f"chain by {name}"] += 1
    TALLY["chain"] += 1


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


def run_problem(seed, number, device, kind):
    """Whether the problem was legal; what it raises is the failure."""
    source = random.Random(f"{seed}-{number}")
    legal = kind != "all" or source.random() < 0.75
    description, run = legal_problem(source, device, kind) if legal else illegal_problem(source, device)
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
    kinds = parser.add_mutually_exclusive_group()
    for name, text in KINDS.items():
        kinds.add_argument(f"--{name}", dest="kind", action="store_const", const=name, default="all", help=text)
    parser.add_argument("--first", type=int, default=0, help="the number of the first problem")
    return parser.parse_args()


def run_problems(options, start, counts):
    """Run problems until time, number or failures are used up; `counts` tells the watching process how far it came."""
    kind = "" if options.kind == "all" else f"--{options.kind} "
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
                counts[LEGAL] += run_problem(options.seed, number, options.device, options.kind)
            except Exception:
                counts[FAILURES] += 1
                traceback.print_exc()
                print(f"FAILED, repeat with: {again} {number}", flush=True)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(f"{counts[DONE]} problems in {shown - start:.0f} s, {counts[FAILURES]} failures", flush=True)
    print("checked: " + ", ".join(f"{count} {name}" for name, count in sorted(TALLY.items())), flush=True)


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
