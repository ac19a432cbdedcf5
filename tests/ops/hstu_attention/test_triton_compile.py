"""The Triton kernels compiled and assembled for sm_90a, without a GPU: no spills, no product is serialised.

Every entry of the table of block sizes with `--slow`; without, one width of the heads. Skips without Triton.
"""

import functools
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch

from recsys import environment
from recsys.ops import AttentionMask, CachedRelativeBias, SequenceLayout
from recsys.ops.hstu_attention.block_sizes import BLOCKS, CHOSEN_WITH, SMALL_BLOCKS
from tests.ops import harness
from tests.tools.assembled import SHARED_MEMORY, assembled, compile_kernel, descriptor_type, needs_gluon

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

TYPES = {2: ("bf16", torch.bfloat16), 4: ("fp32", torch.float32)}
NUMBERS = (
    "items",
    "time_edges",
    "timestamps",
    "key_bounds",
    "next_timestamps",
    "row_bounds",
    "cache_timestamps",
)
NUMBERS += ("cache_bounds", "ends", "shifts", "first_diagonal")
FLOATS = ("position_table", "time_table", "float_edges", "behind", "ahead", "cache_behind")
FLOATS += ("position_partial", "time_partial", "position_sums", "time_sums")
POINTERS = dict.fromkeys(NUMBERS, "i64") | dict.fromkeys(FLOATS, "fp32")
PACKED_POINTERS = {"time_table": "i32", "time_edges": "u8", "float_edges": "i32"}
OPERANDS = ("q", "k", "v", "cache_k", "cache_v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
KERNELS = {name: name for name in ("forward", "cached", "keys", "rows")} | {
    "split": "cached",
    "described": "forward",
    "grad_k": "keys",
    "grad_v": "keys",
    "tables": "diagonals",
    "other_tables": "others",
    "packed_forward": "forward",
    "packed_described": "forward",
    "packed_rows": "rows",
    "packed_any_rows": "rows",
}
KERNELS |= {f"packed_{name}{how}": "keys" for name in ("keys", "sums") for how in ("", "_by_pointers")}
"""The kernel of each entry, less `_kernel`."""

DESCRIBED = ("described", "packed_described", "packed_keys", "packed_rows", "packed_sums")
SIZES = BLOCKS | {("cached", biased): BLOCKS["forward", biased] for biased in (False, True)}
SIZES |= {("other_tables", True): BLOCKS["tables", True]}
SIZES |= {(f"{name}_by_pointers", True): BLOCKS[name, True] for name in ("packed_keys", "packed_sums")}
SMALL_SIZES = SMALL_BLOCKS | {("cached", False): SMALL_BLOCKS["forward", False]}
SMALL_SHARED = 99 * 1024


def cases_of(sizes, copies=()):
    """The entries of a table; all but one size of each kernel that is not named among `copies` are slow."""
    return [
        pytest.param(
            *kernel,
            *size,
            marks=[] if size == (128, 2) and kernel not in copies else pytest.mark.slow,
            id="-".join(map(str, (*kernel, *size))),
        )
        for kernel, blocks in sizes.items()
        for size in blocks
    ]


@functools.cache
def compiled(kernel, biased, width, itemsize, precision="tf32x3", capability=90, to_ptx=True):
    """The PTX of a kernel with everything that the mask can ask of it; compiled once for all tests."""
    from recsys.ops.hstu_attention import triton_kernels
    from recsys.ops.hstu_attention.bias import table_kernels
    from recsys.ops.hstu_attention.cached import triton as cached

    modules = {"cached": cached, "split": cached, "tables": table_kernels, "other_tables": table_kernels}
    module = modules.get(kernel, triton_kernels)
    function = getattr(module, f"{KERNELS[kernel]}_kernel")
    blocks = (SIZES if capability == 90 else SMALL_SIZES)[kernel, biased][width, itemsize]
    constants = dict.fromkeys(("D", "V", "BLOCK_D", "BLOCK_V"), width)
    constants |= {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.keys, "BIASED": biased, "FAST": itemsize == 2}
    constants |= {"WINDOWED": True, "TARGET_WINDOW": False, "GROUPED": True, "CONTEXTUAL_READS": True}
    constants |= {"PRECISION": precision, "GRAD_K": kernel != "grad_v", "GRAD_V": kernel != "grad_k"}
    constants |= {"BUCKETS": 64, "DESCRIBED": kernel in DESCRIBED}
    constants |= {"SPLIT": kernel == "split", **assemblies_of(kernel, blocks)}
    constants |= {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    if blocks.max_registers is not None:
        constants["maxnreg"] = blocks.max_registers
    pointers = POINTERS | (PACKED_POINTERS if kernel.startswith("packed_") else {})
    types = {name: f"*{dtype}" for name, dtype in pointers.items()}
    types |= {"alpha": "fp32", "inverse_scale": "fp32"}
    types |= dict.fromkeys(OPERANDS, f"*{TYPES[itemsize][0]}")
    if kernel in DESCRIBED:
        rows = {"q": blocks.rows, "grad_out": blocks.rows, "k": blocks.keys, "v": blocks.keys}
        shown = {name: f"tensordesc<{TYPES[itemsize][0]}[1, 1, {n}, {width}]>" for name, n in rows.items()}
        types |= shown
    with tempfile.TemporaryDirectory() as folder:
        return compile_kernel(
            function, types, constants, Path(folder), other="i32", capability=capability, to_ptx=to_ptx
        )


def assemblies_of(kernel, blocks):
    """The inline assembly of the kernels with packed scores; none for the others."""
    from recsys.ops.hstu_attention.bias import ptx as bias_ptx

    bias, tables = ("", "", ""), ("", "", "")
    if kernel.startswith("packed_"):
        rows_first = "keys" not in kernel and "sums" not in kernel
        assert blocks.rows == blocks.keys == bias_ptx.BLOCK_TOKENS and blocks.num_warps == bias_ptx.WARPS
        sums = "sums" in kernel
        bias = bias_ptx.add_bias(rows_first) + (bias_ptx.begin(sums),)
        if sums:
            tables = bias_ptx.add_to_tables() + (bias_ptx.finish_sums(),)
    names = (
        "BIAS_TEXT",
        "BIAS_CONSTRAINTS",
        "BEGIN_TEXT",
        "TABLES_TEXT",
        "TABLES_CONSTRAINTS",
        "FINISH_TEXT",
    )
    return dict(zip(names, bias + tables, strict=True))


def check_spills(made, width, itemsize):
    version = environment.version_numbers(environment.tool_version(environment.find_ptxas()))
    chosen_for = triton.__version__.startswith(CHOSEN_WITH) and version >= environment.MINIMAL_PTXAS
    if chosen_for and (width, itemsize) != (256, 4):
        assert made.spills == 0, made.report


COPIES = (("split", False), ("cached", True), ("keys", False), ("rows", False))
"""Kernels that need fewer registers than the same kernel with a bias or with several programs per tile, such
as `("split", True)`, and differ in no further way."""

SMALL_COPIES = (("cached", False), ("split", False), ("rows", False))
"""Kernels whose loops are those of `("forward", False)`."""


@pytest.mark.parametrize(("kernel", "biased", "width", "itemsize"), cases_of(SIZES, COPIES))
def test_it_fits_into_the_registers_and_the_shared_memory(kernel, biased, width, itemsize, tmp_path):
    made = assembled(compiled(kernel, biased, width, itemsize), tmp_path)
    assert made.shared <= SHARED_MEMORY
    assert "serializ" not in made.report, made.report  # of wgmma: each would wait for the one before it
    check_spills(made, width, itemsize)


@pytest.mark.parametrize("capability", [80, pytest.param(89, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kernel", "biased", "width", "itemsize"), cases_of(SMALL_SIZES, SMALL_COPIES))
def test_it_fits_into_other_gpus(kernel, biased, width, itemsize, capability, tmp_path):
    made = compiled(kernel, biased, width, itemsize, capability=capability)
    made = assembled(made, tmp_path, f"sm_{capability}")
    assert made.shared <= SMALL_SHARED
    check_spills(made, width, itemsize)


@pytest.mark.parametrize("kernel", ["forward", "cached"])
def test_products_of_16_bits_use_the_instructions_of_hopper(kernel):
    ptx = compiled(kernel, False, 128, 2).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert copies and set(copies) == {"0x10"}  # of keys and values: 16 bytes at a time


@pytest.mark.parametrize("kernel", ["tables", "other_tables"])
@pytest.mark.parametrize(
    "width", [128, *(pytest.param(width, marks=pytest.mark.slow) for width in (64, 256))]
)
def test_sums_by_time_bucket_are_each_in_one_thread(kernel, width):
    """Else several threads would add the same sum to memory."""
    code = compiled(kernel, True, width, 2).asm["ttgir"]
    layouts = set(re.findall(r'"red\.[^\n]*-> tensor<\d+xi32, (#\w+)>', code))
    assert layouts
    for layout in layouts:
        (made,) = re.findall(rf"^{layout} = (.*)$", code, re.MULTILINE)
        assert "linear<{register = []," in made and "[0]" not in made, made


@pytest.mark.parametrize("kernel", [name for name, _ in BLOCKS if name.startswith("packed_")])
def test_packed_scores_are_where_the_assembly_takes_them_to_be(kernel):
    """16 rows a warp, 8 columns after the other: all that the assembly handles is laid out like that."""
    for width, itemsize in BLOCKS[kernel, True]:
        blocks = BLOCKS[kernel, True][width, itemsize]
        others = blocks.rows if kernel in ("packed_keys", "packed_sums") else blocks.keys
        code = compiled(kernel, True, width, itemsize, to_ptx=False).asm["ttgir"]
        packed = re.findall(rf"packed_element = {others // 2} .*-> tensor<(\d+)x(\d+)x\w+, (#\w+)>", code)
        assert len(packed) == (2 if kernel == "packed_sums" else 1)
        for rows, columns, layout in packed:
            (made,) = re.findall(rf"^{layout} = (.*)$", code, re.MULTILINE)
            assert (int(rows), int(columns)) == (16 * blocks.num_warps, others)
            assert "#ttg.nvidia_mma<{versionMajor = 3" in made, made
            assert f"warpsPerCTA = [{blocks.num_warps}, 1], instrShape = [16, {others}, 16]" in made, made


@needs_gluon
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_programs_of_the_gluon_kernel_share_a_processor_and_no_product_waits(every, dtype, tmp_path):
    """Registers without spills, shared memory with that of the assembly, products under way at a time."""
    from recsys.ops.hstu_attention.bias.hopper_kernel import BLOCKS, biased_kernel

    constants = {"WINDOWED": every, "TARGET_WINDOW": False, "GROUPED": every, "CONTEXTUAL_READS": True}
    constants |= assemblies_of("packed_sums", BLOCKS)
    types = POINTERS | {"time_table": "i32", "near": "u8", "records": "i32"}
    types = {name: f"*{kind}" for name, kind in (types | {"grad_k": dtype, "grad_v": dtype}).items()}
    shown = [name for name in biased_kernel.arg_names if name.endswith("_desc")]
    types |= dict.fromkeys(shown, descriptor_type(dtype, (1, 1, 64, 64)))
    types |= {"rows_desc": descriptor_type("fp32", (1, 1, 64, 64)), "alpha": "fp32", "inverse_scale": "fp32"}
    made = compile_kernel(biased_kernel, types, constants, tmp_path, other="i32")
    program = assembled(made, tmp_path)
    check_spills(program, 64, 2)
    assert "serializ" not in program.report, program.report
    (declared,) = re.findall(r"(\d+) bytes smem", program.report)
    assert 2 * (made.metadata.shared + int(declared) + 1024) <= 228 * 1024
    packed = re.findall(r"packed_element = 32 .*-> tensor<64x64x\w+, (#\w+)>", made.asm["ttgir"])
    assert len(packed) == 2
    (layout,) = {re.findall(rf"^{name} = (.*)$", made.asm["ttgir"], re.MULTILINE)[0] for name in packed}
    assert "#ttg.nvidia_mma<{versionMajor = 3" in layout, layout
    assert "warpsPerCTA = [4, 1], instrShape = [16, 64, 16]" in layout, layout


@pytest.fixture
def compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def layout_with(lengths, targets, contextual, rows):
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return SequenceLayout.trusted(lengths, offsets, targets, contextual, rows, rows, rows)


def test_a_traced_graph_holds_the_kernels(compiling):
    """With sizes as symbols, for the compiler to embed; few nodes beside the work lists. Kernels: forward,
    keys, rows, two of the tables, and of the times one for each pair of block sizes."""
    from recsys.ops.hstu_attention import triton as launch
    from recsys.ops.hstu_attention.problem import FlatProblem

    rest = (2, 3, 1, False, 1, True, 0.1, 64.0, True)

    def both(q, *tensors):
        problem = FlatProblem(*tensors, *rest).rebuilt(q.shape[0])
        wrap = torch.library.wrap_triton
        out = launch.forward(q, q, q, problem, wrap)
        return [out, *launch.backward(out, q, q, q, problem, tables=True, wrap=wrap)]

    q, lengths = torch.randn(101, 2, 64, dtype=torch.bfloat16), torch.tensor([50, 51])
    offsets, times = torch.tensor([0, 50, 101]), torch.zeros(101, dtype=torch.int64)
    tensors = (lengths, offsets, lengths * 0, torch.zeros(2, 40), torch.zeros(2, 20), times, times)
    sizes = [BLOCKS[kernel, True][64, 2] for kernel in ("forward", "keys", "rows", "tables")]
    kernels = 5 + len({(blocks.rows, blocks.keys) for blocks in sizes})
    assert len(harness.assert_traced(both, q, *tensors, kernels=kernels, every=True).nodes) < 1500


def test_a_traced_graph_holds_the_cached_kernel(compiling):
    from recsys.ops.hstu_attention.cached import triton as triton_ops

    mask = AttentionMask(window=2, prefix=3, target_window=True)

    def attend(q, cache, lengths, cached, *of_bias):
        layout = layout_with(lengths, lengths // 2, 0, q.shape[0])
        cache_layout = layout_with(cached, cached * 0, 1, cache.shape[0])
        bias = CachedRelativeBias(*of_bias)
        problem = triton_ops.CachedProblem(layout, mask, 0.1, 64.0, bias, cache_layout=cache_layout)
        return triton_ops.forward(q, q, q, cache, cache, problem, torch.library.wrap_triton)

    q, cache = (torch.randn(rows, 2, 64, dtype=torch.bfloat16) for rows in (101, 307))
    lengths, cached = torch.tensor([50, 51]), torch.tensor([107, 200])
    times = (torch.zeros(rows, dtype=torch.int64) for rows in (101, 101, 307))
    tensors = (q, cache, lengths, cached, torch.zeros(2, 40), torch.zeros(2, 20), *times)
    assert len(harness.assert_traced(attend, *tensors, kernels=3, every=True).nodes) < 800
