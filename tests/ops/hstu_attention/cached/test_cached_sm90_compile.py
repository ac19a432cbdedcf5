"""The Hopper kernel of candidates compiled and assembled for sm_90a, without a GPU: registers, memory."""

import pytest

from recsys import environment

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.hstu_attention.cached import sm90_launch
from tests.ops.hstu_attention.test_sm90_compile import assembled, check_loop, check_resources, product_loops


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dim", sm90_launch.SIZES)
def test_it_fits_and_its_products_overlap(dim, grouped, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    environment.prefer_packaged_ptxas()
    sizes = sm90_launch.SIZES[dim]
    constants = {
        "D": dim,
        "BLOCK_N": sizes.keys,
        "STAGES": sizes.stages,
        "Q_TILES": sizes.q_tiles,
        "GROUPED": grouped,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
    }
    rows = {f"{name}_desc": sizes.keys for name in ("k", "v", "ck", "cv")} | {"q_desc": 64, "o_desc": 64}
    made = assembled(sm90_launch.candidates_kernel, constants, rows, tmp_path)
    registers = sm90_launch.STRIPS * sizes.computing_registers + sizes.loading_registers
    check_resources(made, registers)
    loops = product_loops(made.sass)
    assert len(loops) == 2 * sm90_launch.STRIPS, "a loop of new keys and one of cached ones, for each strip"
    for loop in loops:
        check_loop(loop, dim, sizes.keys)
    assert sum("FSEL" in " ".join(loop) for loop in loops) == sm90_launch.STRIPS, "only new keys are hidden"
