"""The Hopper gradients of two kernels compiled and assembled for sm_90a, without a GPU."""

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.hstu_attention.hopper import two_pass
from recsys.ops.hstu_attention.hopper.two_pass import SIZES
from tests.ops.hstu_attention import test_hopper_compile as compiling

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
