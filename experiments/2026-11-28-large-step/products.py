"""Would projections in fp8 pay? Times the products of an STU layer of the large step in bf16 and in fp8.

    python products.py [--tokens 131072] [--width 1024]

fp8 has a scale for each row of either factor (torch._scaled_mm); what it takes to round a factor, with its row's
largest number, is timed as one pass of a kernel over it. Weight gradients stay in bf16.
"""

import argparse
import statistics

import torch
import triton
import triton.language as tl

LARGEST = 448.0


@triton.jit
def round_kernel(x, out, scales, W: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(x + row * W + column, mask=column < W, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) / 448.0, 1e-12)
    tl.store(out + row * W + column, (values / scale).to(tl.float8e4nv), mask=column < W)
    tl.store(scales + row, scale)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(len(x), 1, device=x.device)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    round_kernel[(len(x),)](x, out, scales, width, block, num_warps=4)
    return out, scales


def milliseconds(function) -> float:
    for _ in range(5):
        function()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(400_000)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--width", type=int, default=1024)
    arguments = parser.parse_args()
    tokens, width = arguments.tokens, arguments.width
    print(torch.cuda.get_device_name(), torch.__version__, f"{tokens} tokens, width {width}")
    shapes = {
        "uvqk, forward": (width, 4 * width),
        "uvqk, gradient of its input": (4 * width, width),
        "output, forward": (3 * width, width),
        "output, gradient of its input": (width, 3 * width),
    }
    total = {"bf16": 0.0, "fp8": 0.0, "rounding": 0.0}
    for name, (inner, outer) in shapes.items():
        x = torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
        (x8, sx), (w8, sw) = rounded(x), rounded(weight)

        def plain(x=x, weight=weight):
            return x @ weight.t()

        def scaled(x8=x8, sx=sx, w8=w8, sw=sw):
            return torch._scaled_mm(
                x8, w8.t(), scale_a=sx, scale_b=sw.t(), out_dtype=torch.bfloat16, use_fast_accum=True
            )

        exact = plain().float()
        error = (scaled().float() - exact).norm() / exact.norm()
        del exact
        times = {"bf16": milliseconds(plain), "fp8": milliseconds(scaled)}
        times["rounding"] = milliseconds(lambda x=x: rounded(x))
        for kind, time in times.items():
            total[kind] += time
        gain = times["bf16"] - times["fp8"] - times["rounding"]
        print(
            name,
            {kind: round(time, 3) for kind, time in times.items()},
            f"saves {gain:.3f} ms, error {error:.3f}",
        )
    layer = total["bf16"] - total["fp8"] - total["rounding"]
    print(f"a layer saves {layer:.2f} ms, eight layers {8 * layer:.1f} ms of a step")


if __name__ == "__main__":
    main()
