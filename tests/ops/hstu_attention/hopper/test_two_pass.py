"""The Hopper gradients of two kernels, without a GPU: logic in the emulator, then what is assembled."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops import AttentionMask
from recsys.ops.hstu_attention.hopper import two_pass
from recsys.ops.hstu_attention.hopper.two_pass import SIZES
from recsys.ops.hstu_attention.problem import Problem
from recsys.ops.runtime import hopper_launch
from tests.ops.cases import MASKS, layout_of, samples
from tests.ops.hstu_attention import test_hopper_compile as compiling
from tests.ops.hstu_attention.test_hopper_emulated import DTYPES, inputs, results
from tests.tools.gluon_emulator import Emulated

EVERYTHING = AttentionMask(130, 70, True, 5)


@pytest.fixture
def emulated(monkeypatch):
    for kernel in ("keys_kernel", "wide_keys_kernel", "rows_kernel"):
        monkeypatch.setattr(two_pass, kernel, Emulated(getattr(two_pass, kernel)))
    monkeypatch.setattr(hopper_launch, "num_processors", lambda device: 3)


def check(shapes, contextual, mask, dim=256, heads=1, seed=0):
    layout = layout_of(samples(contextual, shapes))
    tensors = inputs(layout.total_len, dim, heads, seed)
    cotangent = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(seed + 1)).bfloat16()
    problem = Problem(layout, mask, dim**-0.5, 50.0, None)
    got = two_pass.backward(cotangent, *tensors, problem)[:3]
    want, theirs = (
        results(layout, mask, *(t.to(dtype) for t in (cotangent, *tensors)))[1:] for dtype in DTYPES
    )
    for name, ours, exact, other in zip("qkv", got, want, theirs, strict=True):
        norm = exact.norm().clamp(min=1e-30)
        error, allowed = ((t.double() - exact).norm() / norm for t in (ours, other))
        assert ours.isfinite().all() and error <= 2 * allowed + 1e-3, (name, float(error), float(allowed))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("shape", [(64, 0), (1, 0), (63, 0), (65, 0), (128, 0), (129, 0), (300, 0)])
def test_one_causal_sample(emulated, shape, dim):
    check([shape], 0, AttentionMask(), dim)


CONTEXTUAL = (0, 3, 70, 130)
MASKED_CASES = [
    (mask, CONTEXTUAL[(i + kernel) % 4], dim)
    for i, mask in enumerate((*MASKS[::5], AttentionMask(window=40, prefix=9)))
    for kernel, dim in enumerate((64, 256))
]
MASKED_CASES += itertools.product((EVERYTHING,), CONTEXTUAL, (64, 256))


@pytest.mark.parametrize(("mask", "contextual", "dim"), MASKED_CASES)
def test_masks(emulated, mask, contextual, dim):
    """The mask with everything meets each number of contextual tokens, the others one number each."""
    check([(150, 3), (0, 2), (0, 0), (260, 0), (1, 140), (20, 20)], contextual, mask, dim)


@pytest.mark.parametrize("dim", SIZES)
def test_heads_and_many_tiles(emulated, dim):
    check([(200, 7), (90, 3), (330, 0), (1, 0)], 2, AttentionMask(), dim, heads=2)
    check([(300, 150), (0, 2), (20, 20)], 70, EVERYTHING, dim)


def test_nothing(emulated):
    check([(0, 0), (0, 0)], 0, AttentionMask())


MASKED = [pytest.param(name, marks=[pytest.mark.slow] * (name != "causal")) for name in compiling.MASKS]


def constants(dim, mask, **rest):
    names = ("WINDOWED", "TARGET_WINDOW", "GROUPED", "CONTEXTUAL_READS")
    sizes = SIZES[dim]
    rest |= {"COMPUTING_REGISTERS": sizes.computing_registers, "LOADING_REGISTERS": sizes.loading_registers}
    return {"D": dim, **rest, **dict(zip(names, compiling.MASKS[mask], strict=True))}


def check_assembled(made, dim, block, num_loops, num_masked):
    """No spills in loops, the mask only where it is needed. Returns products and waits of each loop."""
    sizes = SIZES[dim]
    compiling.check_resources(made, 2 * sizes.computing_registers + sizes.loading_registers)
    loops = compiling.product_loops(made.sass)
    names = [[re.sub(r"^@!?U?P\w+ ", "", line).split()[0] for line in loop] for loop in loops]
    assert len(loops) == num_loops
    assert sum("FSEL" in loop for loop in names) == num_masked
    for loop in names:
        assert not any(name.startswith(("STL", "LDL")) for name in loop)
        assert loop.count("MUFU.TANH") in (0, 64 * block // 128)
    return [[name for name in loop if name.startswith(("HGMMA", "WARPGROUP.DEPBAR"))] for loop in names]


@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("dim", SIZES)
def test_tiles_of_keys_assembled(tmp_path, dim, mask):
    sizes = SIZES[dim]
    chosen = constants(dim, mask, BLOCK_M=sizes.rows, STAGES=sizes.stages)
    boxes = {"q_desc": sizes.rows, "g_desc": sizes.rows} | dict.fromkeys(("dk_desc", "dv_desc"), 64)
    if sizes.v_tiles == 0:
        boxes |= dict.fromkeys(("k_desc", "v_desc"), 64)
        made = compiling.assembled(two_pass.wide_keys_kernel, chosen, boxes, tmp_path)
        for loop in check_assembled(made, dim, sizes.rows, num_loops=3, num_masked=1):
            waits = [i for i, name in enumerate(loop) if name.startswith("WARP")]
            assert waits == [dim // 16, dim // 16 + 1 + sizes.rows // 16], (
                "one wait for each of the two products"
            )
        return
    chosen["V_STAGES"] = sizes.v_tiles
    boxes |= dict.fromkeys(("k_desc", "v_desc"), 128)
    made = compiling.assembled(two_pass.keys_kernel, chosen, boxes, tmp_path)
    for loop in check_assembled(made, dim, sizes.rows, num_loops=4, num_masked=2):
        waits = [i for i, name in enumerate(loop) if name.startswith("WARP")]
        both, sums = 2 * dim // 16, sizes.rows // 16
        assert waits == [both, both + 1 + sums, both + 2 + 2 * sums, both + 3 + 2 * sums], (
            "the first two products start together, the others while one before is under way"
        )


@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("dim", SIZES)
def test_tiles_of_rows_assembled(tmp_path, dim, mask):
    sizes = SIZES[dim]
    chosen = constants(
        dim, mask, BLOCK_N=sizes.keys, K_STAGES=sizes.k_stages, V_STAGES=sizes.v_stages, APART=sizes.apart
    )
    boxes = dict.fromkeys(("q_desc", "g_desc", "dq_desc"), 64) | dict.fromkeys(
        ("k_desc", "v_desc"), sizes.keys
    )
    made = compiling.assembled(two_pass.rows_kernel, chosen, boxes, tmp_path)
    both = 2 * dim // 16
    for loop in check_assembled(made, dim, sizes.keys, num_loops=4, num_masked=2):
        waits = [i for i, name in enumerate(loop) if name.startswith("WARP")]
        assert waits == [both, both + 1, both + 2 + sizes.keys // 16], "the first two products start together"
    assert "MUFU.TANH" in made.sass
