"""Small batches through all forms of `linear_attention` in the order A, B, A, for compute-sanitizer.

    python sanitize.py [--save FILE]
        A, B, A over chunks, widths and lengths, then 200 launches without waiting; checks that repeated calls
        are equal bit for bit and near the reference in float64
    CUDA_LAUNCH_BLOCKING=1 python sanitize.py --compare FILE
        the same without the reference, and checks that all results are those of FILE, bit for bit
    compute-sanitizer --tool memcheck|racecheck --report-api-errors no python sanitize.py --short
        the same with one small batch and nothing else

Run from the root of the repository; `--form 0` to `--form 3` take one form. Exit code 1 says what differs.
"""

import argparse
from itertools import cycle, islice

import torch
from torch import Tensor

from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.ops import SequenceLayout, linear_attention  # noqa: E402
from recsys.ops.linear_attention import triton_launch  # noqa: E402

GUARD = 4096
"""Elements of known value on either side of each input, which must not be read into a result or written."""
SMALL = ([70, 1, 64, 9], [3, 0, 1, 8])
BATCHES = (SMALL, ([700, 64, 2, 333, 130], [5, 0, 1, 2, 0]), SMALL, ([5000, 3], [0, 1]), SMALL)
"""Lengths and targets, small, large and small again: one compiled kernel serves all of them."""
EXACT = {"dtype": torch.float64, "backend": "reference", "guard": False}
STEPS = ((64, 64), (32, 32), (64, 128), (64, 64))
"""Tokens a chunk and width of a head; the last repeats the first."""


def guarded(tensor: Tensor) -> Tensor:
    """A copy between two bands of NaN, which a read out of bounds would carry into the results."""
    whole = tensor.new_full((tensor.numel() + 2 * GUARD,), float("nan"))
    part = whole[GUARD:-GUARD].view(tensor.shape)
    part.copy_(tensor)
    return part.requires_grad_()


def run(
    lengths, targets, dim, *, delta, per_head, dtype=torch.bfloat16, backend="triton", guard=True
) -> list[Tensor]:
    """Outputs, final states and gradients of all inputs, the initial state among them."""
    generator = torch.Generator().manual_seed(0)
    layout = SequenceLayout(torch.tensor(lengths), torch.tensor(targets), int(dim == 32)).to("cuda")
    shape = (layout.total_len, 2, dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(*(size or shape), generator=generator)

    q, k, v = normal(), normal(), normal()
    if delta:
        k = torch.nn.functional.normalize(k, dim=-1)
    decay = -torch.nn.functional.softplus(normal() - 3)
    leaves = [*(x.bfloat16() for x in (q, k, v)), decay[..., 0] if per_head else decay]
    leaves.append(normal(len(lengths), 2, dim, dim))
    if delta:
        leaves.append(torch.rand(shape[:2], generator=generator))
    wide = dtype if dtype == torch.float64 else torch.float32
    types = [dtype] * 3 + [wide] * 3
    leaves = [leaf.to("cuda", kind) for leaf, kind in zip(leaves, types, strict=False)]
    leaves = [guarded(leaf) if guard else leaf.requires_grad_() for leaf in leaves]
    beta = leaves[5] if delta else None
    got = linear_attention(*leaves[:4], layout, beta=beta, initial_state=leaves[4], backend=backend)
    cotangents = [normal(*x.shape).to(x) for x in got]
    return [x.detach() for x in (*got, *torch.autograd.grad(list(got), leaves, cotangents))]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def error(made: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error, relative to the norm of its tensor."""
    return max(float((x.double() - y).norm() / y.norm()) for x, y in zip(made, exact, strict=True))


FORMS = [{"delta": delta, "per_head": per_head} for delta in (False, True) for per_head in (False, True)]


def a_b_a(forms, batches, *, against_reference: bool) -> dict[str, list[Tensor]]:
    """Results of all steps by name; each repeated step must equal its first."""
    results: dict[str, list[Tensor]] = {}
    for form in forms:
        for chunk, dim in STEPS:
            triton_launch.CHUNK = chunk
            for lengths, targets in batches:
                name = f"{form} chunk {chunk} dim {dim} {lengths}"
                made = run(lengths, targets, dim, **form)
                if not all(x.isfinite().all() for x in made):
                    raise SystemExit(f"{name}: not finite")
                if name in results and not same(results[name], made):
                    raise SystemExit(f"{name}: the second time differs from the first")
                if name not in results and against_reference:
                    worst = error(made, run(lengths, targets, dim, **form, **EXACT))
                    print(f"{name}: {worst:.1e}", flush=True)
                    if worst > 0.02:
                        raise SystemExit(f"{name}: off by {worst:.1e} of the norm")
                results[name] = made
    return results


def rapid(forms) -> None:
    """Launches 200 calls of changing sizes and widths without waiting, then looks at all of them."""
    cases = [(batch, dim, form) for batch in BATCHES[:2] for dim in (64, 32) for form in forms]
    triton_launch.CHUNK = 64
    want = [run(*batch, dim, **form) for batch, dim, form in cases]
    torch.cuda.synchronize()
    made = [run(*batch, dim, **form) for batch, dim, form in islice(cycle(cases), 200)]
    torch.cuda.synchronize()
    wrong = [i for i, x in enumerate(made) if not same(x, want[i % len(cases)])]
    if wrong:
        raise SystemExit(f"rapid launches {wrong} differ")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--form", type=int, choices=range(4))
    parser.add_argument("--save")
    parser.add_argument("--compare")
    arguments = parser.parse_args()
    forms = FORMS if arguments.form is None else [FORMS[arguments.form]]
    alone = arguments.short or arguments.compare  # the reference takes a launch for each event
    results = a_b_a(forms, (SMALL,) if arguments.short else BATCHES, against_reference=not alone)
    if not arguments.short:
        rapid(forms)
    if arguments.save:
        torch.save(results, arguments.save)
    if arguments.compare:
        saved = torch.load(arguments.compare)
        wrong = [name for name, made in results.items() if not same(saved[name], made)]
        if wrong:
            raise SystemExit(f"differ from {arguments.compare}: {wrong}")
        print("equal bit for bit to", arguments.compare)
    print("done:", len(results), "cases")


if __name__ == "__main__":
    main()
