"""Golden files of a package: inputs of a program with the answer that it gave when the package was made."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save
from torch import Tensor


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Returns the largest |a - b| / max(1, |b|).

    It is infinite if shapes differ, or if NaN or infinity occurs on one side only.
    """
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    both = (a == b) | (a.isnan() & b.isnan())
    difference = ((a - b).abs() / b.abs().clamp(min=1)).masked_fill(both, 0.0)
    return difference.nan_to_num(nan=float("inf")).max().item()


def golden_inputs(stored: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns the flat inputs of a golden file: `input_000`, `input_001`, ..., without `output`."""
    return tuple(stored[name] for name in sorted(stored) if name.startswith("input_"))


def golden_tensors(inputs: tuple[Tensor, ...], output: Tensor) -> dict[str, Tensor]:
    """Names flat inputs and their output for a golden file; reverses `golden_inputs`."""
    named = {f"input_{i:03d}": tensor.contiguous().cpu() for i, tensor in enumerate(inputs)}
    return {**named, "output": output.float().contiguous().cpu()}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a `.safetensors` file with default permissions; `save_file` would let only its owner read it."""
    path.write_bytes(save(tensors))
