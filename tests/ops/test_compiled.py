"""The Triton kernels of all ops but those of attention, compiled for sm_90a and traced, without a GPU.

They keep their numbers in registers, fit into shared memory, access memory in wide pieces and use the
instructions that they are meant to. The usual shapes of each kernel; all of them with `--slow`.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch

from recsys.ops import SequenceLayout
from recsys.ops.gated_norm import GateInputs, GateOptions
from recsys.ops.hstu_attention.work_list.reference import NUM_CACHED_COLUMNS, NUM_COLUMNS
from recsys.ops.linear_logp.recompute import Operands, OutputGrads, RequestedGrads
from tests.ops import harness
from tests.tools.assembled import SHARED_MEMORY, assemble, needs_compiler

pytestmark = needs_compiler

NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


class Case(NamedTuple):
    """A kernel with what it is compiled for, and what must hold of its code."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    unnamed: str = "*i64"
    """Type of the parameters that `types` leaves out."""
    wide: int = 0
    """Accesses of 128 bits that there are at least; then none of several words is narrower than 64."""
    spills: int = 0
    programs: int = 1
    """Programs that a multiprocessor must hold at a time."""
    ptx: tuple[str, ...] = ()
    sass: tuple[str, ...] = ()


def embedding(width, kind, tables) -> Case:
    from recsys.ops.bucket_embedding.triton import embed_kernel

    types = {"x": kind, "table_0": "*fp32", "table_1": "*fp32", "out": "*fp32"}
    constants = _rows(width, 4) | {"TABLES": tables, "SCALE": width**0.5}
    return Case(embed_kernel, types, constants, wide=1)


def _rows(width, itemsize) -> dict[str, Any]:
    from recsys.ops.jagged.triton import blocks_of, step_of

    blocks = blocks_of(width, itemsize)
    sizes = {"BLOCK_M": blocks.rows, "BLOCK": blocks.columns, "STEP": step_of([width])}
    return {"W": width, **sizes, "num_warps": blocks.num_warps}


def segment_pieces(width, several, kind) -> Case:
    """`several`: whether a program has several segments."""
    from recsys.ops.bucket_embedding import triton as triton_ops
    from recsys.ops.jagged.triton import step_of

    block = min(1 << (width - 1).bit_length(), triton_ops.LONGEST_BLOCK)
    rows = triton_ops.rows_of(block)
    constants = {"W": width, "BLOCK_M": rows, "BLOCK": block, "STEP": step_of([width])}
    types = {"values": kind, "out": kind, "partial": "*fp32", "segments": "*i16"}
    constants["TOGETHER"] = rows if several else 1
    return Case(triton_ops.pieces_kernel, types, constants, wide=int(width % 64 == 0))


def segment_shares(width) -> Case:
    from recsys.ops.bucket_embedding import triton as triton_ops

    block = min(1 << (width - 1).bit_length(), triton_ops.SHARE_COLUMNS)
    constants = {"W": width, "BLOCK_M": triton_ops.rows_of(block), "BLOCK": block}
    types = {"out": "*fp32", "partial": "*fp32"}
    return Case(triton_ops.shares_kernel, types, constants, wide=int(width > 1))


def gate(kernel, width, groups, concat) -> Case:
    """Tokens in bfloat16, float32 parameters, dropout."""
    from recsys.ops.gated_norm import triton as triton_ops
    from recsys.ops.runtime.column_sums import row_blocks

    function, five = getattr(triton_ops, kernel), concat and kernel == "backward_kernel"
    per_warp = triton_ops.ENTRIES_PER_WARP_OF_FIVE if five else triton_ops.ENTRIES_PER_WARP
    blocks = row_blocks(width, triton_ops.ENTRIES, per_warp, 1)
    constants = triton_ops._constants(width * groups, GateOptions(groups, 1e-6, concat, 0.2), blocks)
    constants |= {name: 3 * width * groups for name in function.arg_names if name.startswith("STRIDE_")}
    types = dict.fromkeys(("weight", "bias", "sums"), "*fp32") | {"seed": "*i64"}
    return Case(function, types, constants, "*bf16", wide=2 * (width % 8 == 0))


def norm(kernel, width, tokens) -> Case:
    """Tokens of a type, float32 parameters."""
    from recsys.ops.norm_linear import triton as triton_ops
    from recsys.ops.runtime import column_sums

    types = dict.fromkeys(("weight", "bias", "sums"), "*fp32")
    types |= dict.fromkeys(("x", "residual", "grad_x"), tokens)
    if kernel == "sums_kernel":
        function, constants = column_sums.sums_kernel, column_sums.constants_of(width, width)
        types["out"] = "*fp32"
    else:
        function = getattr(triton_ops, kernel)
        blocks = getattr(triton_ops, kernel.replace("kernel", "blocks"))(width)
        constants = triton_ops._constants(width, 1e-6, blocks) | {"STRIDE": width, "STRIDE_R": width}
    return Case(function, types, constants, "*bf16", wide=int(width % 8 == 0))


def gather(width, itemsize, sources) -> Case:
    """Indices by 64 bits, rows in the widest accesses that there are."""
    from recsys.ops.jagged.triton import gather_kernel

    moved = (*(f"source_{number}" for number in range(4)), "out")
    constants = {"SOURCES": sources, **_rows(width, itemsize)}
    types = dict.fromkeys(moved, f"*i{8 * itemsize}")
    return Case(gather_kernel, types, constants, wide=2 * (width * itemsize % 16 == 0))


def gather_sums(width, kind) -> Case:
    from recsys.ops.jagged.triton import sum_kernel

    return Case(sum_kernel, {"given": kind, "out": kind}, _rows(width, 4), wide=int(width > 1))


def tokens(name) -> Case:
    from recsys.ops.jagged import layout_kernels

    return Case(getattr(layout_kernels, name), {}, {"DROPS": True, "LANES": 512})


def linear_logp(kernel, width, dtype, full) -> Case:
    """With everything optional (`full`), or with targets only, which is the loss over a catalogue."""
    from recsys.ops.linear_logp import triton as triton_ops
    from recsys.ops.linear_logp import triton_kernels

    matrix, ids = torch.empty(0, width, dtype=dtype), torch.empty(0, dtype=torch.int64)
    optional = (ids, ids) if full else (None, None)
    given = Operands(matrix, matrix, torch.ones(1) if full else None, torch.ones(1), ids, *optional)
    table = {"of hidden": triton_ops.OF_HIDDEN, "of weight": triton_ops.OF_WEIGHT}
    blocks = triton_ops.blocks_of(given, table.get(kernel, triton_ops.FORWARD))
    types = dict.fromkeys(("target", "candidate_ids", "target_ids"), "*i64") | {"rows": "*i32"}
    types |= {"marks": "*u8"} | dict.fromkeys(("hidden", "weight", "owned", "streamed"), NAMES[dtype])
    constants, of_weight = triton_ops.constants_of(given, blocks), kernel == "of weight"
    function = triton_kernels.forward_kernel
    if kernel != "forward":
        function = triton_kernels.backward_kernel
        constants |= {"OF_WEIGHT": of_weight, "WITH_BIAS": of_weight and full, "WITH_SCALE": False}
    if of_weight:
        types["grad"] = NAMES[dtype]
    ptx = ("wgmma", "cp.async") if dtype == torch.bfloat16 else ()
    return Case(function, types, constants, "*fp32", programs=blocks.programs, ptx=ptx)


def top_k(kernel, width) -> Case:
    """A number of a query may spill, which is read once a group."""
    from recsys.ops.top_k import triton as triton_launch

    constants = {"D": width, "BLOCK_D": width, "STEP": triton_launch.STEP}
    constants |= {"GROUP": triton_launch.BLOCKS[width].group, "K": 16, "CLASSES": triton_launch.CLASSES}
    constants |= {"REMOVED": triton_launch.REMOVED, "num_warps": triton_launch.WARPS}
    types = dict.fromkeys(("widths", "share", "facts", "queries"), "*fp32")
    types |= dict.fromkeys(("removed", "removed_offsets", "best"), "*i64")
    types |= {"maxima": "*i32", "items": "*fp32", "copy": "*fp16"}
    return Case(getattr(triton_launch, kernel), types, constants, "i32", spills=8)


def top_k_product(width) -> Case:
    from recsys.ops.top_k import triton as triton_launch

    blocks = triton_launch.BLOCKS[width]
    rows = {"query_rows": blocks.queries, "item_rows": blocks.group}
    types = {name: f"tensordesc<fp16[{count},{width}]>" for name, count in rows.items()}
    constants = {"BLOCK_M": blocks.queries, "GROUP": blocks.group}
    constants |= {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    types["maxima"] = "*i32"
    sass = ("HGMMA", "UTMALDG.2D")
    return Case(triton_launch.coarse_kernel, types, constants, "i32", spills=8, sass=sass)


def work_items(keys, window, tile, strip) -> Case:
    from recsys.ops.hstu_attention.work_list.kernels import items_kernel

    constants = {"KEYS": keys, "TILE": tile, "STRIP": strip, "BLOCK": 64, "SAMPLES": 32, "LANES": 128}
    constants |= dict.fromkeys(("WINDOWED", "TARGET_WINDOW", "TAIL"), window)
    return Case(items_kernel, {}, constants | {"SECTIONED": not window, "CONTEXTUAL_READS": True})


def cached_work_items(window) -> Case:
    from recsys.ops.hstu_attention.work_list.kernels import cached_items_kernel

    constants = {"TILE": 128, "BLOCK": 64, "WINDOWED": window, "TARGET_WINDOW": window}
    return Case(cached_items_kernel, {}, constants | {"CONTEXTUAL_READS": True, "LANES": 64, "SAMPLES": 32})


def order(columns, padded) -> Case:
    from recsys.ops.hstu_attention.work_list.kernels import order_kernel

    constants = {"COLUMNS": columns, "PADDED": padded, "LANES": 32, "COMPARED": 256}
    return Case(order_kernel, {}, constants)


def beams(name, values, children) -> Case:
    from recsys.ops.beam_step import triton as beams

    types = dict.fromkeys(("logits", "scores", "out_scores"), "*fp32")
    types |= dict.fromkeys(("first", "token", "leaves", "seen_before"), "*i32")
    sizes = {"BLOCK": beams.READ, "STEP": beams.STEP}
    if name == "score_kernel":
        sizes = beams.sizes_of(values, children)
    return Case(getattr(beams, name), types, sizes | {"CHILDREN": children})


def cases(build: Callable[..., Case], usual: list[tuple], slow: Iterable[tuple] = ()) -> list[Any]:
    """Parameters of the test: a function, and the arguments with which it builds a case. `slow` may have the
    usual ones, too."""
    named = [(arguments, ()) for arguments in usual]
    named += [(arguments, pytest.mark.slow) for arguments in slow if arguments not in usual]
    return [
        pytest.param(build, arguments, marks=marks, id="-".join(map(str, (build.__name__, *arguments))))
        for arguments, marks in named
    ]


def product(*choices: Iterable[Any]) -> list[tuple]:
    """All combinations, the last choice varying fastest."""
    return list(itertools.product(*choices))


GATE_SHAPES = [(256, 4), (64, 4), (1024, 1), (2048, 1), (4096, 1), (100, 4), (1, 16)]
BOTH, KERNELS, KINDS = (True, False), ("forward_kernel", "backward_kernel"), ("*bf16", "*fp32")
PIECES = [(512, False), (100, False), (1, False), (64, True), (1, True)]
LOGP_KINDS = [(width, torch.bfloat16) for width in (64, 128, 256, 512)]
LOGP_KINDS += [(width, torch.float32) for width in (64, 128)]
LOGP = [
    (kernel, *kind, full)
    for kernel, kind, full in product(("forward", "of hidden", "of weight"), LOGP_KINDS, BOTH)
]
LOGP_USUAL = [case for case in LOGP if case[1:] == (128, torch.bfloat16, False)]
TOP_K = product(("measure_kernel", "choose_kernel"), (64, 128, 256, 512))
TOP_K_USUAL = [case for case in TOP_K if case[1] == 128]
ITEMS = [(True, False, 128, 128), (False, True, 128, 128), (False, False, 128, 128)]
ITEMS += [(False, True, 128, 64), (False, False, 128, 64), (False, False, 192, 64)]


@pytest.mark.parametrize(
    ("build", "arguments"),
    cases(embedding, [(256, "*fp32", 2)], [(512, "*bf16", 2), (100, "*fp32", 1)])
    + cases(
        segment_pieces,
        [(256, False, "*fp32")],
        [(256, False, "*bf16"), *((*shape, kind) for shape, kind in product(PIECES, KINDS))],
    )
    + cases(segment_shares, [(256,)], [(1,)])
    + cases(
        gate,
        [(kernel, 256, 4, True) for kernel in KERNELS],
        [(kernel, *shape, concat) for kernel, shape, concat in product(KERNELS, GATE_SHAPES, BOTH)],
    )
    + cases(
        norm,
        [*product((*KERNELS, "sums_kernel"), (1024,), KINDS[:1]), ("backward_kernel", 1024, KINDS[1])],
        product((*KERNELS, "sums_kernel"), (64, 100, 256, 1024, 2048, 4096), KINDS),
    )
    + cases(
        gather,
        [(256, 4, 4)],
        [(512, 4, 1), (256, 2, 3), (768, 4, 2), (100, 4, 1), (1, 8, 4), (3, 1, 2)],
    )
    + cases(gather_sums, [(256, "*fp32"), (512, "*bf16")], [(1, "*fp32")])
    + cases(linear_logp, LOGP_USUAL, LOGP)
    + cases(top_k, TOP_K_USUAL, TOP_K)
    + cases(top_k_product, [(128,)], [(64,), (256,), (512,)])
    + cases(work_items, [(True, True, 128, 128)], [(False, True, 192, 64), *ITEMS])
    + cases(cached_work_items, [(True,)], [(False,)])
    + cases(order, [(NUM_CACHED_COLUMNS, 32)], [(NUM_COLUMNS, 16)])
    + cases(beams, [("score_kernel", 256, 256), ("read_kernel", 256, 256)], [("score_kernel", 4096, 4096)])
    + cases(tokens, [("tokens_kernel",), ("source_kernel",)]),
)
def test_it_fits_and_accesses_are_wide(build, arguments, tmp_path):
    case = build(*arguments)
    made = assemble(case.kernel, case.types, case.constants, tmp_path, other=case.unnamed)
    assert made.shared * case.programs <= SHARED_MEMORY
    assert made.spills <= case.spills and "serializ" not in made.report, made.report
    if case.wide:
        assert set(made.vectors) <= {64, 128} and made.vectors.count(128) >= case.wide
    assert all(part in made.ptx for part in case.ptx)
    assert not case.sass or all(part in made.sass for part in case.sass)


# --- traced graphs ----------------------------------------------------------------------------------------


def traced_bucket_gradient():
    from recsys.ops.bucket_embedding import triton as triton_ops

    def sums(values, buckets):
        ordered = triton_ops.sorted_by_bucket(buckets, 5)
        return triton_ops.launch_sums(values, ordered, torch.float32, torch.library.wrap_triton)

    return sums, (torch.randn(33, 24), torch.randint(5, (33,))), 2


def traced_gate():
    from recsys.ops.gated_norm import triton as triton_ops

    def both(*tensors):
        wrap, inputs, options = (
            torch.library.wrap_triton,
            GateInputs(*tensors),
            GateOptions(2, 1e-6, True, 0.2),
        )
        out = triton_ops.launch_forward(inputs, options, wrap)
        return [out, *triton_ops.launch_backward(out, inputs, options, wrap)]

    a, weight = torch.randn(33, 24, dtype=torch.bfloat16), torch.randn(24)
    return both, (a, a, weight, weight, torch.tensor([5])), 2


def traced_gather():
    from recsys.ops.jagged import triton as triton_ops

    def both(first, second, index, places):
        wrap = torch.library.wrap_triton
        out = triton_ops.launch_gather([first, second], index, wrap)
        return out, triton_ops.launch_sum(out, places, first.shape[0] + second.shape[0], wrap)

    values = torch.randn(33, 24, dtype=torch.bfloat16)
    return both, (values, values, torch.arange(20), torch.arange(2 * 66).view(2, 66) - 100), 2


def traced_linear_attention(delta):
    """Forward: three kernels by chunk, the scan, and for segments a sum of each and their combination.

    Backward computes the states again, goes back through them and has two kernels by chunk.
    """
    from recsys.ops.linear_attention import triton_launch
    from recsys.ops.linear_attention.chunks import chunk_table

    def both(q, beta, state, lengths, offsets, num_targets):
        table = chunk_table(lengths, offsets, num_targets, q.shape[0], 16, 0 if delta else 2)
        facts = (table, 1.0, torch.library.wrap_triton, not delta)
        sums = triton_launch.decay_sums(q, table, q.dtype, torch.library.wrap_triton)
        problem = triton_launch.problem_of((q, q, q, sums, beta if delta else None, state), *facts)
        out, final, _ = triton_launch.launch_forward(problem)
        return [out, final, *triton_launch.launch_backward(problem, sums.dtype, None, out, final)]

    layout = SequenceLayout(torch.tensor([33, 5]))
    facts = (layout.lengths, layout.offsets, layout.num_targets)
    tensors = (torch.randn(38, 2, 16), torch.rand(38, 2), torch.randn(2, 2, 16, 16))
    return both, (*tensors, *facts), 4 + 5 if delta else 6 + 9


def traced_linear_logp():
    from recsys.ops.linear_logp import triton as triton_ops

    def both(hidden, weight, scale, target):
        given = Operands(hidden, weight, None, scale, target, None, None)
        sums = triton_ops.launch_forward(given, torch.library.wrap_triton)
        requested = RequestedGrads(True, True, False, True)
        grads = triton_ops.launch_backward(given, OutputGrads(*sums), requested, torch.library.wrap_triton)
        return [*sums, grads.hidden, grads.weight]

    return both, (torch.randn(33, 24), torch.randn(50, 24), torch.ones(1), torch.arange(33)), 4


@pytest.mark.parametrize(
    ("build", "arguments"),
    cases(traced_bucket_gradient, [()])
    + cases(traced_gate, [()])
    + cases(traced_gather, [()])
    + cases(traced_linear_attention, [(True,), (False,)])
    + cases(traced_linear_logp, [()]),
)
def test_a_traced_graph_holds_the_kernels(build, arguments):
    function, tensors, kernels = build(*arguments)
    harness.assert_traced(function, *tensors, kernels=kernels)
