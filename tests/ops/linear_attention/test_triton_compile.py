"""The Triton kernels compiled for sm_90 without a GPU, as a forward and backward pass launches them: the
interpreter accepts types that the compiler refuses."""

import itertools
from unittest import mock

import pytest
import torch

from recsys.ops import SequenceLayout
from recsys.ops.linear_attention.chunks import chunk_table_of
from tests.tools.assembled import SHARED_MEMORY, assembled, compile_kernel, needs_compiler

pytestmark = needs_compiler

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}


def launches_of(dtype, dim, per_head, delta, **sizes):
    """Returns the kernels of both passes over samples of several segments, each with the types of its
    pointers and its constants; `sizes` replaces constants of `triton_launch`."""
    from recsys.ops.linear_attention import triton_launch

    launches = []

    def record(kernel, programs, pointers, numbers, constants, wrap=None):
        launches.append((kernel, [POINTERS[tensor.dtype] for tensor in pointers], constants))

    layout, heads = SequenceLayout(torch.tensor([2000, 300])), 2
    q, k, v = (torch.zeros(layout.total_len, heads, dim, dtype=dtype) for _ in range(3))
    decay = torch.zeros(q.shape[: 2 if per_head else 3])
    beta = torch.zeros(q.shape[:2]) if delta else None
    state = torch.zeros(layout.batch_size, heads, dim, dim)
    with mock.patch.multiple(triton_launch, launch=record, **sizes):
        table = chunk_table_of(layout, triton_launch.CHUNK, 0 if delta else 8)
        sums = triton_launch.decay_sums(decay, table, dtype, None)
        problem = triton_launch.problem_of((q, k, v, sums, beta, state), table, 1.0, None, not delta)
        results = triton_launch.launch_forward(problem)
        triton_launch.launch_backward(problem, decay.dtype, results.kept, results.out, results.final)
    return launches


def compile_all(launches, folder):
    """Compiles every launch and yields pairs of a kernel's name and the compiled kernel."""
    for number, (kernel, pointers, constants) in enumerate(launches):
        types = dict(zip(kernel.arg_names, pointers, strict=False)) | {"scale": "fp32"}
        place = folder / str(number)
        place.mkdir()
        yield kernel.__name__, compile_kernel(kernel, types, constants, place)


SPILLING = ("prepare_kernel", "key_gradients_kernel")
"""Kernels that spill with the delta rule and heads of 64."""


def check_spills(assembled_kernel, delta):
    """Gradients of the delta rule spill: a chunk's, of 64 tokens in bfloat16."""
    assert assembled_kernel.spills <= (1600 if delta else 300), assembled_kernel.report
    assert "serializ" not in assembled_kernel.report, assembled_kernel.report


@pytest.mark.parametrize(
    ("dtype", "dim", "sizes"), [(torch.float32, 16, {"CHUNK": 16}), (torch.bfloat16, 64, {})], ids=str
)
def test_every_kernel_compiles(dtype, dim, sizes, tmp_path):
    """Small blocks compile fast and have the types of large ones; usual ones fit. Each kernel has its form
    with the most code, and a scan has one for whole samples and one for segments."""
    forms = [launches_of(dtype, dim, False, delta, **sizes) for delta in (False, True)]
    launches = itertools.chain.from_iterable(forms)
    last_of_each = {(kernel.__name__, rest[1].get("LOCAL")): (kernel, *rest) for kernel, *rest in launches}
    assert len(last_of_each) == 10
    for number, (name, compiled) in enumerate(compile_all(last_of_each.values(), tmp_path)):
        assert compiled.metadata.shared <= SHARED_MEMORY, name
        if not sizes:
            check_spills(assembled(compiled, tmp_path / str(number)), delta=name in SPILLING)


FORMS = [(per_head, delta) for per_head in (False, True) for delta in (False, True)]
FORM_NAMES = ["channel", "channel, delta rule", "head", "head, delta rule"]


@pytest.mark.slow
@pytest.mark.parametrize(("per_head", "delta"), FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_launch_fits(dtype, dim, per_head, delta, tmp_path):
    launches = launches_of(dtype, dim, per_head, delta)
    for number, (name, compiled) in enumerate(compile_all(launches, tmp_path)):
        assert compiled.metadata.shared <= SHARED_MEMORY, name
        if dtype == torch.bfloat16 and dim > 32 and not per_head:
            check_spills(assembled(compiled, tmp_path / str(number)), delta)
