"""The Hopper kernel of candidates compiled and assembled for sm_90a, without a GPU: registers, memory."""

import pytest

from recsys import environment

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.hstu_attention.cached import sm90_launch
from tests.ops.hstu_attention.test_sm90_compile import (
    SPILLED,
    assembled,
    check_loop,
    check_resources,
    product_loops,
)

SPILLED_OF_FOUR = 1024
"""Bytes that four warp groups, who have half the registers, may put on the stack: for the few blocks of new
keys, not for those of cached ones."""

CASES = [
    *((dim, sizes, SPILLED, 0) for dim, sizes in sm90_launch.SIZES.items()),
    *((dim, sizes, SPILLED_OF_FOUR, 4) for dim, sizes in sm90_launch.LARGE_SIZES.items()),
]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("dim", "sizes", "spilled", "moves"), CASES)
def test_it_fits_and_its_products_overlap(dim, sizes, spilled, moves, grouped, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    environment.prefer_packaged_ptxas()
    constants = {
        "D": dim,
        "BLOCK_N": sizes.keys,
        "STAGES": sizes.stages,
        "STRIPS": sizes.strips,
        "Q_TILES": sizes.q_tiles,
        "GROUPED": grouped,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
    }
    rows = {f"{name}_desc": sizes.keys for name in ("k", "v", "ck", "cv")} | {"q_desc": 64, "o_desc": 64}
    made = assembled(sm90_launch.candidates_kernel, constants, rows, tmp_path)
    registers = sizes.strips * sizes.computing_registers + sizes.loading_registers
    check_resources(made, registers, spilled)
    loops = product_loops(made.sass)
    assert len(loops) == 2 * sizes.strips, "a loop of new keys and one of cached ones, for each strip"
    hiding = [loop for loop in loops if "FSEL" in " ".join(loop)]
    assert len(hiding) == sizes.strips, "only new keys are hidden"
    for loop in loops:
        check_loop(loop, dim, sizes.keys, None if loop in hiding and moves else moves)
