"""Times `linear_attention` beside `hstu_attention` and flash-linear-attention, and SASRec's attention.

    python bench.py attention --json attention.json   time and peak memory, 256 to 65,536 events
    python bench.py peers --json peers.json           chunk_gla and chunk_gated_delta_rule of fla-core
    python bench.py sasrec --json sasrec.json         softmax_attention: padded SDPA and what "auto" takes

Run from the root of the repository. `peers` first compiles the candidates of fla's tuners in parallel
processes. fla then tunes on the two shapes TUNED, outside of all timings, and picks by itself; it gets 25 ms
a candidate instead of 100.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.ops import SequenceLayout, hstu_attention, last_backend, linear_attention, softmax_attention  # noqa: E402
from recsys.ops.softmax_attention import OP as SOFTMAX_ATTENTION  # noqa: E402

HEADS = 8
FORMS = {
    "a channel": {},
    "a head": {"per_head": True},
    "delta, a channel": {"delta": True},
    "delta, a head": {"delta": True, "per_head": True},
}
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SHAPES = {
    "32 x 256": [256] * 32,
    "32 x 2,048": [2048] * 32,
    "4 x 8,192": [8192] * 4,
    "1 x 65,536": [65536],
    "32, Zipf up to 4,096": [max(1, int(4096 / (1 + i) ** 0.6)) for i in range(32)],
    "256, 1 to 400": [1 + (i * 131) % 400 for i in range(256)],
}
TUNED = ("32 x 2,048", "32, Zipf up to 4,096")
PEERS = {"a channel": "chunk_gla", "delta, a head": "chunk_gated_delta_rule"}


@dataclass(frozen=True)
class Cost:
    """Milliseconds of forward, of forward and backward, and MiB above the inputs at its peak; and milliseconds of forward
    and backward in calls one after another, of which only the last is waited for, as in training."""

    forward: float
    both: float
    peak: float
    in_a_row: float

    def text(self) -> str:
        return f"{self.forward:.2f} / {self.both:.2f} / {self.peak:.0f} ({self.in_a_row:.2f} in a row)"


def inputs(lengths: list[int], dim: int, *, delta: bool = False, per_head: bool = False, heads: int = HEADS):
    """A layout and bfloat16 leaves q, k, v, decay and beta; with delta, q and k have length 1."""
    layout = SequenceLayout(torch.tensor(lengths)).to("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (layout.total_len, heads, dim)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    q, k, v = normal(), normal(), normal()
    if delta:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    decay = -torch.nn.functional.softplus(normal() - 3)
    decay = decay[..., 0].contiguous() if per_head else decay
    leaves = [*(x.bfloat16() for x in (q, k, v)), decay]
    if delta:
        leaves.append(torch.rand(shape[:2], generator=generator, device="cuda"))
    return layout, [leaf.requires_grad_() for leaf in leaves]


def ours(layout: SequenceLayout, leaves: list[Tensor], backend: str = "auto") -> Tensor:
    return linear_attention(
        *leaves[:4], layout, beta=leaves[4] if len(leaves) > 4 else None, backend=backend
    ).out


def theirs(name: str, lengths: list[int], layout: SequenceLayout, leaves: list[Tensor]) -> Tensor:
    """fla's result: a batch of equal lengths as such, ragged ones by `cu_seqlens`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla

    function = {"chunk_gla": chunk_gla, "chunk_gated_delta_rule": chunk_gated_delta_rule}[name]
    equal = len(set(lengths)) == 1
    samples = len(lengths) if equal else 1
    q, k, v, g, *beta = (x.unflatten(0, (samples, -1)) for x in leaves)
    fields = {"beta": beta[0]} if beta else {}
    if not equal:
        fields["cu_seqlens"] = layout.offsets
    return function(q, k, v, g=g, **fields)[0].flatten(0, 1)


def milliseconds(function, limit: float = 0.4) -> float:
    """The median time of up to 20 calls, or of as many as `limit` seconds allow, but at least 3."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    times, begin = [], time.perf_counter()
    while len(times) < 3 or (len(times) < 20 and time.perf_counter() - begin < limit):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def cost(forward, leaves: list[Tensor]) -> Cost:
    """Measures a function of leaves; the first call, which compiles or tunes, is not timed."""
    cotangent = torch.randn_like(forward())

    def step() -> None:
        torch.autograd.grad(forward(), leaves, cotangent)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.no_grad():
        alone = milliseconds(forward)
    return Cost(alone, milliseconds(step), peak, in_a_row(step))


def in_a_row(function, limit: float = 0.3) -> float:
    """The time of a call among as many as fill `limit` seconds, at least 5, without waiting between them."""
    function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    torch.cuda.synchronize()
    count = min(100, max(5, int(limit / (time.perf_counter() - begin))))
    begin = time.perf_counter()
    for _ in range(count):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e3


def attention(dims: list[int], lengths: list[int]) -> list[dict]:
    """Prints all lengths with 65,536 events in all and with one sample, beside attention."""
    records = []
    print("milliseconds of forward / of forward and backward / peak MiB, 8 heads, bfloat16")
    for dim in dims:
        for samples_of_one in (False, True):
            ahead: dict[str, int | None] = dict.fromkeys(FORMS)
            for length in lengths:
                samples = 1 if samples_of_one else 65536 // length
                costs = {}
                for form, options in FORMS.items():
                    layout, leaves = inputs([length] * samples, dim, **options)
                    costs[form] = cost(partial(ours, layout, leaves), leaves)
                    taken = last_backend("linear_attention")
                    if taken != "triton":
                        raise RuntimeError(f"linear_attention ran as {taken}, not as triton")
                layout, leaves = inputs([length] * samples, dim)
                q, k, v = leaves[:3]
                attend = partial(hstu_attention, q, k, v, layout, scale_len=2048.0)
                costs["hstu_attention"] = cost(attend, [q, k, v])
                for form in FORMS:
                    faster = costs[form].both < costs["hstu_attention"].both
                    ahead[form] = (ahead[form] or length) if faster else None
                print(
                    f"{samples} x {length} D{dim}",
                    *(f"| {name} {c.text()}" for name, c in costs.items()),
                    flush=True,
                )
                records += [record(f"{samples} x {length}", dim, name, c) for name, c in costs.items()]
            print(
                f"D{dim}, {'one sample' if samples_of_one else '65,536 events'}: faster than attention from",
                ahead,
            )
    return records


def record(shape: str, dim: int, name: str, measured: Cost) -> dict:
    return {
        "shape": shape,
        "dim": dim,
        "name": name,
        "backend": last_backend("linear_attention"),
        **vars(measured),
    }


def compile_peer(name: str, form: str, dim: int, shape: str, part: int, parts: int) -> None:
    """Compiles a part of the candidates of fla's tuners into Triton's cache on disk; times nothing."""
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, kwargs: whole(self, kwargs)[part::parts] or whole(self, kwargs)[:1]
    Autotuner.do_bench = property(lambda _: lambda function, **__: (function(), [0.0, 0.0, 0.0])[1])
    Autotuner.check_disk_cache = lambda self, key, configs, bench: (bench(), False)[1]
    lengths = [-(-n // 8) for n in SHAPES[shape]]  # as many samples, whose number is in some keys
    layout, leaves = inputs(lengths, dim, **FORMS[form])
    out = theirs(name, lengths, layout, leaves)
    torch.autograd.grad(out, leaves, torch.randn_like(out))
    torch.cuda.synchronize()


def compile_peers(dims: list[int], deadline: float) -> None:
    """Runs `compile_peer` in parallel; what is late is compiled while tuning."""
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    cases = [(name, form, dim, shape) for form, name in PEERS.items() for dim in dims for shape in TUNED]
    parts = max(1, round(1.5 * cores / len(cases)))
    jobs = [(*case, part, parts) for case in cases for part in range(parts)]
    begin = time.perf_counter()
    workers = [context.Process(target=compile_peer, args=job) for job in jobs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, begin + deadline - time.perf_counter()))
    late = [worker for worker in workers if worker.is_alive()]
    for worker in late:
        worker.terminate()
    failed = sum(worker.exitcode != 0 for worker in workers if worker not in late)
    print(
        f"compiled fla's candidates: {time.perf_counter() - begin:.0f} s, {len(late)} late, {failed} failed",
        flush=True,
    )


def tune(name: str, form: str, dim: int) -> None:
    """Lets fla tune the kernels of both passes, for equal and for ragged lengths."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    Autotuner.do_bench = property(lambda _: partial(do_bench, warmup=5, rep=25))
    for shape in TUNED:
        layout, leaves = inputs(SHAPES[shape], dim, **FORMS[form])
        out = theirs(name, SHAPES[shape], layout, leaves)
        torch.autograd.grad(out, leaves, torch.randn_like(out))
        torch.cuda.synchronize()


def naive(name: str, lengths: list[int], leaves: list[Tensor]) -> Tensor:
    """fla's plain recurrence, a sample at a time in float32."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla

    outs = []
    for parts in zip(*(leaf.float().split(lengths) for leaf in leaves), strict=True):
        q, k, v, g, *beta = (part[None] for part in parts)
        if name == "chunk_gla":
            out = naive_recurrent_gla(q, k, v, g)
        else:
            out = naive_recurrent_gated_delta_rule(q, k, v, beta[0], g)
        outs.append(out[0][0])
    return torch.cat(outs)


def compare(name: str, form: str, dim: int) -> dict:
    """Errors by norm of output and gradients in bfloat16, against fla's plain recurrence."""
    lengths = [200, 64, 1, 131]
    layout, leaves = inputs(lengths, dim, **FORMS[form])
    cotangent = torch.randn(leaves[2].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")

    def results(out: Tensor) -> list[Tensor]:
        return [x.detach().float() for x in (out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype)))]

    want = results(naive(name, lengths, leaves))
    errors = {
        who: [float((x - y).norm() / y.norm()) for x, y in zip(results(out), want, strict=True)]
        for who, out in (
            ("ours", ours(layout, leaves)),
            (name, theirs(name, lengths, layout, leaves)),
        )
    }
    for who, values in errors.items():
        print(f"error D{dim} {form}: {who}", *(f"{x:.1e}" for x in values), flush=True)
    return {"form": form, "dim": dim, "errors of out, q, k, v, decay, beta": errors}


def peers(dims: list[int], deadline: float, only_compile: bool) -> list[dict]:
    """Prints each form beside its peer on all shapes; forms without a peer are left out."""
    import fla

    begin = time.perf_counter()
    if deadline:
        compile_peers(dims, deadline)
    if only_compile:
        return []
    print(f"fla {fla.__version__}; milliseconds of forward / of forward and backward / peak MiB", flush=True)
    records = []
    for dim in dims:
        for form, name in PEERS.items():
            try:
                tune(name, form, dim)
            except RuntimeError as error:
                print(f"{name} D{dim} is left out: {str(error).splitlines()[0]}", flush=True)
                continue
            print(f"tuned {name} D{dim}: {time.perf_counter() - begin:.0f} s", flush=True)
            records.append(compare(name, form, dim))
            for shape, lengths in SHAPES.items():
                layout, leaves = inputs(lengths, dim, **FORMS[form])
                mine = cost(partial(ours, layout, leaves), leaves)
                peer = cost(partial(theirs, name, lengths, layout, leaves), leaves)
                ratio = peer.both / mine.both
                print(
                    f"{shape} D{dim} {form}: ours {mine.text()}, {name} {peer.text()}, {ratio:.2f} times",
                    flush=True,
                )
                records += [record(shape, dim, form, mine), record(shape, dim, name, peer)]
            print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    return records


def sasrec() -> list[dict]:
    """Prints SASRec's attention on histories as of MovieLens-1M and of up to 1,024 events."""
    records = []
    generator = torch.Generator().manual_seed(0)
    long = (1024 * torch.rand(64, generator=generator) ** 2).long().clamp_min(1)
    movies = (400 * torch.rand(512, generator=generator)).long().clamp(1, 200)
    shapes = {
        "256 as of ML-1M": (movies[:256], 1, 50),
        "512 as of ML-1M": (movies, 2, 64),
        "64 x 1,024": (torch.full((64,), 1024), 2, 64),
        "64, up to 1,024": (long, 2, 64),
        "64, up to 1,024, 8 heads of 128": (long, 8, 128),
    }
    for shape, (lengths, heads, dim) in shapes.items():
        layout, leaves = inputs(lengths.tolist(), dim, heads=heads)
        q, k, v = leaves[:3]
        line = []
        for backend in SOFTMAX_ATTENTION.backends:
            try:
                measured = cost(partial(softmax_attention, q, k, v, layout, backend=backend), [q, k, v])
            except (RuntimeError, ValueError) as error:
                print(f"{shape} {backend}: {str(error)[:200]}")
                continue
            line.append(f"{backend} {measured.text()}")
            records.append({"shape": shape, "heads": heads, "dim": dim, "backend": backend, **vars(measured)})
        print(f"{shape} ({heads} x {dim}):", "; ".join(line), flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["attention", "peers", "sasrec"])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="widths of heads")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of `attention`")
    parser.add_argument("--deadline", type=float, default=100, help="seconds in which `peers` compiles; 0: not")
    parser.add_argument("--only-compile", action="store_true", help="for a later `peers`, beside other work")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    measures = {
        "attention": partial(attention, arguments.dims, arguments.lengths),
        "peers": partial(peers, arguments.dims, arguments.deadline, arguments.only_compile),
        "sasrec": sasrec,
    }
    records = measures[arguments.what]()
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, {time.perf_counter() - begin:.0f} s")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"card": card, "torch": torch.__version__, "records": records}, indent=1)
        )


if __name__ == "__main__":
    main()
