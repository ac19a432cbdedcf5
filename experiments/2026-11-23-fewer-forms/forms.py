#!/usr/bin/env python3
"""Is each special kernel worth its code? Times every op with it and without it, on shapes that users have.

    python experiments/2026-11-23-fewer-forms/forms.py --out FILE.json [--only top_k linear_logp] [--seconds 95]

Each row compares the results of its variants first, then times them in turn, round by round. `ms` is the time of
a call when calls follow one another, launches included; `gpu ms` is the time of the GPU's work alone, measured
while the host runs ahead. "gain" is the time without the form divided by the time with it. Rows that do not start
within `--seconds` are skipped and named; rows of ops that have been removed fail. On a CPU the script runs tiny shapes on the reference, to test itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys import ops
from recsys.ops import RelativeBias, SequenceLayout, hstu_attention

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BF16, F32 = torch.bfloat16, torch.float32
ROUNDS = 11
ROUND_MS = 4.0
"""About how long a variant is timed in a round."""

Call = Callable[[], Any]


class Row(NamedTuple):
    """One comparison. `variants()` returns calls by name, the one with the form first."""

    form: str
    shape: str
    variants: Callable[[], dict[str, Call]]
    tolerance: float = 2e-2


def size(large: int, tiny: int) -> int:
    """The size on a GPU, or the one of the script's own test on a CPU."""
    return large if ON_GPU else tiny


def named(backend: str) -> str:
    """The backend, or on a CPU the reference."""
    return backend if ON_GPU else "reference"


def randn(*shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
    """Normal numbers on the device."""
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def leaf(*shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
    """`randn` that wants a gradient."""
    return randn(*shape, dtype=dtype, scale=scale).requires_grad_()


def step(forward: Callable[[], Tensor | tuple[Tensor, ...]], leaves: list[Tensor]) -> Call:
    """A call that computes `forward()` and the gradients of the leaves, with a fixed cotangent."""
    cotangents: list[Tensor] = []

    def call() -> list[Tensor]:
        outputs = forward()
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if not cotangents:
            generator = torch.Generator(device=DEVICE).manual_seed(7)
            for output in outputs:
                noise = torch.randn(output.shape, generator=generator, device=DEVICE)
                cotangents.append(noise.to(output.dtype))
        return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]

    return call


def without_gradients(function: Call) -> Call:
    """The call under `torch.no_grad`."""

    def call() -> Any:
        with torch.no_grad():
            return function()

    return call


@contextlib.contextmanager
def replaced(name: str, package: str, value: Any) -> Iterator[None]:
    """Within the block, `name` is `value` in every loaded module of the package that has it."""
    found = [m for key, m in list(sys.modules.items()) if key.startswith(package) and hasattr(m, name)]
    if not found:
        raise LookupError(f"no module of {package} has {name}")
    before = [getattr(module, name) for module in found]
    for module in found:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, original in zip(found, before, strict=True):
            setattr(module, name, original)


def under(context: Callable[[], contextlib.AbstractContextManager[None]], call: Call) -> Call:
    """The call within the context; entering it costs some microseconds of the host."""

    def within() -> Any:
        with context():
            return call()

    return within


# --- the rows ---------------------------------------------------------------------------------------------


def logp_row(rows: int, items: int, width: int, unit: bool) -> Row:
    """Loss over a catalogue, as retrieval configs call it (unit vectors, temperature .05) or without norms."""

    def variants() -> dict[str, Call]:
        hidden, weight = leaf(rows, width, dtype=BF16), leaf(items, width, dtype=BF16, scale=0.1)
        target = torch.randint(items, (rows,), device=DEVICE)
        temperature = 0.05 if unit else 1.0

        def forward(backend: str) -> Tensor:
            options = {"temperature": temperature, "ignore_index": -1, "l2_normalize": unit}
            return ops.linear_logp(hidden, weight, target, backend=backend, **options).logp

        names = ["sm90", "triton", "reference"]
        return {name: step(partial(forward, named(name)), [hidden, weight]) for name in names}

    kind = "unit" if unit else "plain"
    return Row("linear_logp", f"{rows} x {items} x {width} {kind}", variants)


def top_k_row(items: int, width: int, queries: int, dtype: torch.dtype = BF16, k: int = 100) -> Row:
    """Exact search; `plain` multiplies in bfloat16 and is not exact: compared for speed alone."""

    def variants() -> dict[str, Call]:
        catalogue, wanted = randn(items, width, dtype=dtype), randn(queries, width)
        none, lengths = torch.empty(0, dtype=torch.int64), torch.zeros(queries, dtype=torch.int64)

        def search(backend: str) -> list[Tensor]:
            found = ops.top_k(wanted, catalogue, k, removed=none, removed_lengths=lengths, backend=backend)
            return [found.scores]

        def plain() -> list[Tensor]:
            best, query = None, wanted.to(dtype)
            for start in range(0, items, 2**18):
                scores = query @ catalogue[start : start + 2**18].T
                part = scores.topk(min(k, scores.shape[1]), dim=1).values
                best = part if best is None else torch.cat([best, part], 1).topk(k, dim=1).values
            return [best.float()]

        calls = {name: partial(search, named(name)) for name in ("sm90", "triton")}
        return {**calls, "plain torch": plain}

    return Row("top_k", f"{items} x {width}, {queries} queries", variants)


def norm_linear_row(tokens: int, width: int, training: bool, silu: bool = True) -> Row:
    """Layer norm, projection to u, v, q, k and SiLU, as an STU layer calls it."""

    def variants() -> dict[str, Call]:
        x = leaf(tokens, width, dtype=BF16)
        norm_weight, norm_bias = leaf(width, scale=0.1), leaf(width, scale=0.1)
        weight, bias = leaf(4 * width, width, scale=width**-0.5), leaf(4 * width)
        leaves = [x, norm_weight, norm_bias, weight, bias]

        def forward(backend: str) -> tuple[Tensor, ...]:
            options = {"eps": 1e-6, "dtype": BF16, "silu": silu, "backend": backend}
            return ops.norm_linear(x, norm_weight, norm_bias, weight, bias, [width] * 4, **options).parts

        call = step if training else lambda function, _: without_gradients(function)
        triton = call(partial(forward, named("triton")), leaves)
        cublas = partial(replaced, "_hopper_kernel", "recsys.ops.norm_linear", lambda: None)
        variants = {"hopper": triton, "triton": under(cublas, triton)} if ON_GPU else {"triton": triton}
        return {**variants, "reference": call(partial(forward, "reference"), leaves)}

    kind = "fwd+bwd" if training else "fwd"
    return Row("norm_linear", f"{tokens} x {width} -> {4 * width} {kind}{' silu' if silu else ''}", variants)


def linear_add_row(tokens: int, width: int, x_dtype: torch.dtype, training: bool) -> Row:
    """Output projection and residual sum; in inference the sum takes the place of x, as in `STULayer`."""

    def variants() -> dict[str, Call]:
        x, y = leaf(tokens, width, dtype=x_dtype), leaf(tokens, width, dtype=BF16)
        weight, bias = leaf(width, width, scale=width**-0.5), leaf(width)
        if not training:
            held = x.detach() * 0

        def op(backend: str) -> Tensor:
            if training:
                return ops.linear_add(x, y, weight, bias, backend=backend)
            return ops.linear_add(held.zero_(), y, weight, bias, in_place=True, backend=backend)

        def plain() -> Tensor:
            branch = F.linear(y, weight.to(BF16), bias.to(BF16))
            return x + branch.to(x_dtype) if training else held.zero_().add_(branch)

        call = step if training else lambda function, _: without_gradients(function)
        leaves = [x, y, weight, bias]
        return {"triton": call(partial(op, named("triton")), leaves), "plain torch": call(plain, leaves)}

    kind = f"x {str(x_dtype)[6:]} {'fwd+bwd' if training else 'fwd in place'}"
    return Row("linear_add", f"{tokens} x {width} {kind}", variants)


def attention_row(batch: int, length: int) -> Row:
    """Attention with a relative bias of 64 time buckets, which the kernels with inline assembly take: all
    gradients in one Hopper kernel, or by Triton's kernels. The two must launch different kernels."""

    def variants() -> dict[str, Call]:
        heads, dim, buckets = 4, 64, 64
        layout = SequenceLayout(torch.full((batch,), length)).to(DEVICE)
        q, k, v = (leaf(batch * length, heads, dim, dtype=BF16) for _ in range(3))
        gaps = torch.randint(1, 100_000, (batch, length), device=DEVICE)
        timestamps = (1_700_000_000 + gaps.cumsum(1)).flatten()
        position, times = leaf(length, scale=0.1), leaf(buckets, scale=0.1)
        bias = RelativeBias(position, times, timestamps, timestamps + 3_600)

        def forward() -> Tensor:
            backend = named("triton")
            return hstu_attention(q, k, v, layout, scale_len=float(length), bias=bias, backend=backend)

        call = step(forward, [q, k, v, position, times])
        if not ON_GPU:
            return {"triton": call}
        call()
        lacking = partial(replaced, "missing_for_hopper", "recsys.ops.hstu_attention", lambda: "not wanted")
        without = under(lacking, call)
        names = kernels_of(call), kernels_of(without)
        if names[0] == names[1]:
            raise RuntimeError(f"both variants launch the same kernels: {sorted(names[0])}")
        print(f"  only with: {sorted(names[0] - names[1])}; only without: {sorted(names[1] - names[0])}")
        return {"hopper": call, "triton": without}

    return Row("bias/hopper", f"B{batch} L{length} 4 x 64, 64 buckets", variants, tolerance=3e-2)


def kernels_of(call: Call) -> set[str]:
    """Names of the GPU kernels that a call launches, once it is compiled."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


def layout_row(batch: int, length: int) -> Row:
    """What a step asks of a fresh layout: indices of tokens, a truncation, positions and ages."""

    def variants() -> dict[str, Call]:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(length // 4, length + 1, (batch,), generator=generator) + 12
        host = SequenceLayout(lengths, torch.full_like(lengths, 10), 2)
        from recsys import protos as pb
        from recsys.modules.positional import PositionalEncoder

        config = pb.PositionalEncoder(num_positions=length + 16, num_time_buckets=2048)
        encoder = PositionalEncoder(config, embedding_dim=64).to(DEVICE)
        values = randn(host.total_len, 64)
        request = torch.full((host.total_len,), 1_700_000_000, device=DEVICE)
        timestamps = request - torch.randint(10**7, request.shape, device=DEVICE)

        def call() -> list[Tensor]:
            layout = host.to(DEVICE)
            shorter = layout.truncate(length // 2)
            with torch.no_grad():
                encoded = encoder(values, layout, timestamps, request)
            numbers = (layout.sample_ids(), layout.positions(), shorter.index, shorter.layout.sample_ids())
            indices = layout.assemble_index, layout.disassemble_index
            made = [index() if callable(index) else index for index in indices]
            return [encoded, *numbers, *made]

        without = partial(replaced, "has_kernels", "recsys.ops.runtime", lambda device: False)
        return {"kernels": call, "plain torch": under(without, call)}

    return Row("layout kernels", f"B{batch} up to {length} tokens", variants)


def segment_row(segments: int, mean: int, width: int) -> Row:
    """Pooling of multi-valued features (width of an embedding) and sums of candidates' logits (few columns)."""

    def variants() -> dict[str, Call]:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(0, 2 * mean + 1, (segments,), generator=generator).to(DEVICE)
        count = int(lengths.sum())
        values = leaf(count, width)
        index = torch.arange(count, device=DEVICE)

        def index_add() -> Tensor:
            rows = torch.repeat_interleave(lengths, output_size=count)
            return values.new_zeros(segments, width).index_add(0, rows, values)

        def reduce() -> Tensor:
            return torch.segment_reduce(values, "sum", lengths=lengths, axis=0)

        def bag() -> Tensor:
            offsets = F.pad(lengths.cumsum(0), (1, 0))
            return F.embedding_bag(index, values, offsets, mode="sum", include_last_offset=True)

        calls: dict[str, Callable[[], Tensor]] = {
            "triton": lambda: ops.segment_sum(values, lengths, backend=named("triton")),
            "reference": lambda: ops.segment_sum(values, lengths, backend="reference"),
            "index_add": index_add,
            "segment_reduce": reduce,
            "embedding_bag": bag,
        }
        return {name: step(call, [values]) for name, call in calls.items()}

    return Row("segment_sum", f"{segments} segments of ~{mean} x {width} fwd+bwd", variants)


def bucket_row(tokens: int, width: int, dtype: torch.dtype) -> Row:
    """Positions and ages added to tokens; positions of a batch repeat, ages crowd in few buckets."""

    def variants() -> dict[str, Call]:
        x = leaf(tokens, width, dtype=dtype)
        tables = [leaf(1024, width), leaf(2049, width)]
        ages = (randn(tokens).abs() * 300).long().clamp(max=2048)
        buckets = [torch.arange(tokens, device=DEVICE) % 1024, ages]

        def forward(backend: str) -> Tensor:
            return ops.bucket_embedding(x, tables, buckets, scale=width**0.5, backend=backend)

        names = ("triton", "reference")
        return {name: step(partial(forward, named(name)), [x, *tables]) for name in names}

    return Row("bucket_embedding", f"{tokens} x {width} {str(dtype)[6:]} fwd+bwd", variants)


def gated_row(tokens: int, width: int, gate: str) -> Row:
    """Norm, gate and dropout of an STU layer."""

    def variants() -> dict[str, Call]:
        attended, u = leaf(tokens, width, dtype=BF16), leaf(tokens, width, dtype=BF16)
        weight, bias = leaf(width), leaf(width)
        seed = torch.tensor([5], device=DEVICE)

        def forward(backend: str) -> Tensor:
            options: dict[str, Any] = {"gate": gate, "dropout": 0.2, "seed": seed, "backend": backend}
            return ops.gated_norm(attended, u, weight, bias, **options)

        leaves = [attended, u, weight, bias]
        return {name: step(partial(forward, named(name)), leaves) for name in ("triton", "reference")}

    return Row("gated_norm", f"{tokens} x {width} {gate} fwd+bwd", variants)


def rows() -> list[Row]:
    """Decisions that are most open come first."""
    million, tokens = size(1_000_000, 300), (size(4096, 33), size(32768, 40), size(131072, 50))
    return [
        *(logp_row(size(25_000, 20), size(3_700, 30), width, True) for width in (64, 128)),
        logp_row(size(8192, 20), size(12_101, 30), 64, True),
        logp_row(size(2048, 20), size(100_000, 40), 64, True),
        *(logp_row(size(8192, 20), million, 128, unit) for unit in (True, False)),
        *(norm_linear_row(count, width, True) for width in (512, 1024) for count in tokens),
        norm_linear_row(tokens[1], 512, False),
        top_k_row(million, 128, size(1024, 8)),
        top_k_row(size(100_000, 300), 64, size(256, 8)),
        top_k_row(10 * million, 128, size(4096, 8)),
        *(attention_row(size(batch, 2), size(length, 9)) for length, batch in ((256, 128), (1024, 32), (2048, 16))),
        *(linear_add_row(count, width, BF16, True) for width in (512, 1024) for count in tokens),
        linear_add_row(tokens[1], 512, F32, True),
        linear_add_row(tokens[1], 512, BF16, False),
        *(layout_row(size(batch, 3), size(200, 9)) for batch in (64, 256, 1024)),
        *(segment_row(size(segments, 6), mean, width)
          for segments, mean, width in ((65_536, 3, 16), (65_536, 3, 64), (1024, 8, 4))),
        *(bucket_row(count, width, dtype)
          for count, width, dtype in ((tokens[0], 64, F32), (tokens[2], 64, F32), (tokens[2], 512, BF16))),
        *(gated_row(count, width, gate) for count, width, gate in
          ((tokens[0], 64, "ugn"), (tokens[1], 512, "ugn"), (tokens[2], 512, "ugn"), (tokens[1], 512, "concat"))),
        *(logp_row(size(4096, 20), size(100_000, 40), width, unit)
          for width in (256, 512) for unit in (True, False)),
    ]  # fmt: skip


# --- comparing and timing ---------------------------------------------------------------------------------


def differences(expected: list[Tensor], got: list[Tensor]) -> float:
    """The largest relative difference of a tensor, by norm; NaN counts as infinite."""
    worst = 0.0
    for one, other in zip(expected, got, strict=True):
        one, other = one.detach().double(), other.detach().double()
        error = float((one - other).norm() / one.norm().clamp(min=1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst


def results_of(call: Call) -> list[Tensor]:
    """The tensors of a call."""
    made = call()
    return [made] if isinstance(made, Tensor) else list(made)


def now() -> float:
    """Seconds, when the device has done all it was told."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(call: Call, count: int) -> tuple[float, float]:
    """Milliseconds of one of `count` calls: with launches, and of the GPU alone."""
    if not ON_GPU:
        start = now()
        for _ in range(count):
            call()
        return (now() - start) / count * 1e3, float("nan")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    marks[0].record()
    for _ in range(count):
        call()
    marks[1].record()
    host = time.perf_counter() - start
    few = min(count, 4)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(min(1.5 * host * few / count, 0.02) * 2e9))
    marks[2].record()
    for _ in range(few):
        call()
    marks[3].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]) / count, marks[2].elapsed_time(marks[3]) / few


def measure(row: Row) -> dict[str, Any]:
    """Compares the variants of a row and times them in turn."""
    calls = row.variants()
    first = next(iter(calls))
    expected = results_of(calls[first])
    errors, counts = {}, {}
    for name, call in calls.items():
        errors[name] = differences(expected, results_of(call))
        call()
        start = now()
        call()
        counts[name] = max(1, min(50, round(ROUND_MS / max((now() - start) * 1e3, 1e-3))))
    del expected
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    start = now()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(timed(call, counts[name]))
        if now() - start > 1.0 and len(times[first]) >= 3:
            break
    found = {
        name: {
            "ms": statistics.median(both[0] for both in some),
            "gpu_ms": statistics.median(both[1] for both in some),
            "difference": errors[name],
            "agrees": errors[name] <= row.tolerance,
        }
        for name, some in times.items()
    }
    return {"form": row.form, "shape": row.shape, "variants": found}


def line_of(result: dict[str, Any]) -> str:
    """A row of the table; the gain is that over the variant's first."""
    variants = result["variants"]
    base = next(iter(variants.values()))
    parts = []
    for name, found in variants.items():
        gain = f" gain {found['ms'] / base['ms']:.2f}/{found['gpu_ms'] / base['gpu_ms']:.2f}"
        wrong = "" if found["agrees"] else f" DIFFERS {found['difference']:.1e}"
        parts.append(f"{name} {found['ms']:.3f}/{found['gpu_ms']:.3f}{'' if found is base else gain}{wrong}")
    return f"{result['form']:<16} {result['shape']:<34} " + " | ".join(parts)


def main() -> int:
    """Prints a line a row as it is done; writes all rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON with all rows")
    parser.add_argument("--only", nargs="+", help="names of forms")
    parser.add_argument("--seconds", type=float, default=95.0, help="no row starts later")
    options = parser.parse_args()
    start, done, skipped = time.perf_counter(), [], []
    device = torch.cuda.get_device_name() if ON_GPU else "CPU (self-test)"
    print(f"{device}, torch {torch.__version__}; each variant: ms / gpu ms, gain of the first over it")
    for row in rows():
        if options.only and row.form not in options.only:
            continue
        if time.perf_counter() - start > options.seconds:
            skipped.append(f"{row.form} {row.shape}")
            continue
        torch.manual_seed(0)
        try:
            done.append(measure(row))
            print(line_of(done[-1]), flush=True)
        except Exception as error:  # a row that fails must not cost the others
            trace = traceback.format_exc().splitlines()
            done.append({"form": row.form, "shape": row.shape, "error": trace[-6:]})
            print(f"{row.form:<16} {row.shape:<34} FAILED {type(error).__name__}: {error}"[:400], flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.0f} s; skipped: {', '.join(skipped) or 'none'}")
    options.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": done}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
