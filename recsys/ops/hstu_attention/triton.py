"""The Triton backend of `hstu_attention`: what it can do, and the way to its kernels.

This module itself needs no Triton. The kernels are in `triton_forward` and `triton_backward`, what they share
in `triton_tile`; `work_list` tells them which tiles there are, `triton_launch` starts them and `triton_ops`
makes them differentiable.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from functools import lru_cache

import torch
from torch import Tensor

from recsys import environment
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.dispatch import Support
from recsys.ops.layout import SequenceLayout
from recsys.ops.mask import AttentionMask
from recsys.ops.relative_bias import RelativeBias

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 256

# Triton decides when it is imported, by its own variable, whether kernels are compiled or interpreted.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INSTALLED = importlib.util.find_spec("triton") is not None
_HERE = __name__.rpartition(".")[0]

COMPILES = _INSTALLED and torch.version.cuda is not None
"""Whether kernels run on this machine's devices: they are imported at once, a traced call could not do it."""

if COMPILES:
    environment.prefer_packaged_ptxas()
    importlib.import_module(f"{_HERE}.triton_ops")


@lru_cache(maxsize=1)
def warn_about_assembler() -> None:
    """Says once when kernels for Hopper would be assembled by a ptxas that may get them wrong."""
    path = environment.find_ptxas()
    version = environment.tool_version(path) if path else ""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if on_hopper and environment.version_numbers(version) < environment.MINIMAL_PTXAS:
        logger.warning(
            "ptxas %s (%s) miscompiles some Triton kernels on Hopper: wrong numbers or illegal accesses. "
            "Type: pip install 'nvidia-cuda-nvcc>=13.3'",
            version or "of unknown version",
            path,
        )


def supports(facts: AttentionFacts) -> Support:
    """CUDA, 16 or 32 bits, heads of up to 256. On a CPU only for tests of the kernels, by interpretation."""
    if facts.device == "cpu":
        if not _INTERPRETED:
            return Support(False, "it needs CUDA tensors, these are on the CPU", auto=False)
    elif facts.device != "cuda":
        return Support(False, f"it needs CUDA tensors, these are on {facts.device}", auto=False)
    if not _INSTALLED:
        return Support(False, "Triton is not installed; type: pip install triton")
    if facts.dtype not in DTYPES:
        return Support(False, f"it takes bfloat16, float16 and float32, not {facts.dtype}")
    for name, dim in (("qk_dim", facts.qk_dim), ("v_dim", facts.v_dim)):
        if dim > MAX_DIM:
            return Support(False, f"{name} is {dim}, it takes up to {MAX_DIM}")
    # Only for those who name it: its tests have passed in the interpreter, not yet on a GPU.
    return Support(True, auto=False)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    mask: AttentionMask,
    *,
    alpha: float,
    scale_len: float,
    bias: RelativeBias | None,
    deterministic: bool,
) -> Tensor:
    """Scores, sums and bias in float32; work and memory follow the tokens that are there."""
    if not torch.compiler.is_compiling():
        warn_about_assembler()
    ops = importlib.import_module(f"{_HERE}.triton_ops")
    problem = ops.Problem(layout, mask, alpha, scale_len, bias)
    if torch.compiler.is_compiling():
        return ops.call_op(q, k, v, problem, deterministic)
    tables = (None, None) if bias is None else (bias.position_table, bias.time_table)
    return ops.HstuAttention.apply(q, k, v, *tables, problem, deterministic)
