"""The Hopper kernel of candidates compiled and assembled for sm_90a, without a GPU: registers, memory."""

import re

import pytest

from recsys import environment

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.hstu_attention.cached import sm90_launch  # noqa: E402
from tests.ops.hstu_attention.test_sm90_compile import SPILLED, assembled  # noqa: E402


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
    assert made.shared <= 227 * 1024
    assert "serializ" not in made.report, made.report  # of wgmma: each would wait for the one before it
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", made.report)]
    assert max(spilled) <= SPILLED, made.report
