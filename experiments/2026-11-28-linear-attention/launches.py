"""Times the kernels of `linear_attention` with other launches: blocks, warps, stages, chunks and segments.

    PYTHONPATH=. python experiments/2026-11-28-linear-attention/launches.py [--dim 128] [--only G chunk]

One sample of 65,536 events, 8 heads, forward and backward, all four forms. Prints for each
variant the microseconds of all kernels and of each, by torch's profiler, and the largest relative difference of the
results from those of the usual launches. A variant that does not fit prints its error.
"""

import argparse

import torch
import triton
from bench import inputs, ours
from torch.profiler import ProfilerActivity, profile

from recsys.ops.linear_attention import triton_launch

LENGTH, TIMED = 65_536, 6
FORMS = {
    "head": {"per_head": True},
    "channel": {},
    "delta head": {"per_head": True, "delta": True},
    "delta channel": {"delta": True},
}
KERNELS = {
    "G": "key_gradients_kernel",
    "W": "value_gradients_kernel",
    "S": "states_kernel",
    "B": "state_gradients_kernel",
    "P": "prepare_kernel",
    "O": "out_kernel",
}
LAUNCH, CHUNK, PROGRAMS = triton_launch.launch, triton_launch.CHUNK, triton_launch.PROGRAMS_PER_PROCESSOR


def variants() -> dict[str, dict]:
    """Returns what each variant replaces: constants of a kernel by its letter, tokens of a chunk, or programs."""
    made: dict[str, dict] = {"usual": {}}

    def add(letter: str, warps: int, stages: int, **blocks: int) -> None:
        name = " ".join([letter, *map(str, blocks.values()), f"w{warps}", f"s{stages}"])
        made[name] = {letter: blocks | {"num_warps": warps, "num_stages": stages}}

    for keys in (32, 64, 128):
        for values in (32, 64, 128):
            for warps in (4, 8):
                add("G", warps, 1, BLOCK_D=keys, BLOCK_V=values)
    for keys, values, warps in ((64, 64, 4), (64, 64, 8), (32, 64, 4), (32, 128, 4), (64, 128, 8), (64, 32, 4)):
        add("G", warps, 2, BLOCK_D=keys, BLOCK_V=values)
    add("G", 4, 3, BLOCK_D=64, BLOCK_V=64)
    for keys, values, warps, stages in ((64, 64, 8, 1), (64, 64, 4, 2), (128, 64, 4, 1), (128, 128, 8, 1), (64, 32, 4, 1)):
        add("W", warps, stages, BLOCK_D=keys, BLOCK_V=values)
    for letter in "SB":
        for warps, stages in ((4, 2), (4, 4), (8, 2), (8, 3)):
            add(letter, warps, stages)
    for keys, warps, stages in ((32, 4, 1), (128, 4, 1), (128, 8, 1), (64, 8, 1), (64, 4, 2)):
        add("P", warps, stages, BLOCK_D=keys)
    for warps, stages in ((8, 2), (4, 1), (4, 3), (8, 1)):
        add("O", warps, stages)
    made |= {f"chunk {tokens}": {"chunk": tokens} for tokens in (32, 128)}
    made["chunk 128, G w8"] = {"chunk": 128, "G": {"num_warps": 8}}
    return made | {f"programs {count}": {"programs": count} for count in (1, 4)}


def use(variant: dict) -> None:
    """Makes the next calls take a variant."""
    triton_launch.CHUNK = variant.get("chunk", CHUNK)
    triton_launch.PROGRAMS_PER_PROCESSOR = variant.get("programs", PROGRAMS)

    def launch(kernel, programs, pointers, numbers, constants, wrap):
        for letter, name in KERNELS.items():
            if kernel.fn.__name__ == name:
                constants = constants | variant.get(letter, {})
        LAUNCH(kernel, programs, pointers, numbers, constants, wrap)

    triton_launch.launch = launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--only", nargs="+", help="beginnings of the names of variants")
    arguments = parser.parse_args()
    chosen = {
        name: variant
        for name, variant in variants().items()
        if name == "usual" or not arguments.only or name.startswith(tuple(arguments.only))
    }
    for form, settings in FORMS.items():
        compare(form, *inputs([LENGTH], arguments.dim, **settings), chosen)


def compare(form: str, layout, leaves: list[torch.Tensor], chosen: dict[str, dict]) -> None:
    """Prints a line for each variant; the first is the usual one."""
    cotangent = torch.randn_like(leaves[2])

    def step() -> list[torch.Tensor]:
        out = ours(layout, leaves, "triton")
        return [out, *torch.autograd.grad(out, leaves, cotangent)]

    usual: list[torch.Tensor] = []
    for name, variant in chosen.items():
        use(variant)
        try:
            results = step()
            usual = usual or results
            print(f"{form:14} {name:18} {timed(step)} difference {difference(results, usual):.1e}", flush=True)
        except (RuntimeError, ValueError, triton.runtime.errors.OutOfResources, triton.CompilationError) as error:
            print(f"{form:14} {name:18} {type(error).__name__}: {str(error)[:100]}", flush=True)


def timed(step) -> str:
    """Returns the microseconds of all kernels of a step, and of each by its letter."""
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(TIMED):
            step()
        torch.cuda.synchronize()
    events = [(event.key, event.self_device_time_total / TIMED) for event in profiler.key_averages()]
    texts = [f"all {sum(time for _, time in events):.0f}"]
    for letter, kernel in KERNELS.items():
        texts.append(f"{letter} {sum(time for key, time in events if key.startswith(kernel)):.0f}")
    return " ".join(texts)


def difference(results: list[torch.Tensor], usual: list[torch.Tensor]) -> float:
    pairs = zip(results, usual, strict=True)
    return max(((x - y).float().norm() / y.float().norm()).item() for x, y in pairs)


if __name__ == "__main__":
    main()
