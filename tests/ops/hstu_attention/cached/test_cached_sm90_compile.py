"""The Hopper kernel of candidates compiled and assembled for sm_90a, without a GPU: registers, memory."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops.hstu_attention.cached import hopper_launch
from tests.ops.hstu_attention.test_hopper_compile import assembled, check_loop, check_resources, product_loops

SIZES = [*hopper_launch.SIZES.items(), *hopper_launch.LARGE_SIZES.items()]
# Groups of targets change the loop of new keys only, in the same way for all sizes.
CASES = [(*sizes, False) for sizes in SIZES] + [
    pytest.param(*sizes, True, marks=[pytest.mark.slow] * (number > 0)) for number, sizes in enumerate(SIZES)
]


@pytest.mark.parametrize(("dim", "sizes", "grouped"), CASES)
def test_it_fits_and_its_products_overlap(dim, sizes, grouped, tmp_path):
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
    made = assembled(hopper_launch.candidates_kernel, constants, rows, tmp_path)
    registers = sizes.strips * sizes.computing_registers + sizes.loading_registers
    check_resources(made, registers)
    loops = product_loops(made.sass)
    assert len(loops) == 2 * sizes.strips, "a loop of cached keys and one of new ones, for each strip"
    texts = [" ".join(loop) for loop in loops]
    assert sum("FSEL" in text for text in texts) == sizes.strips, "only new keys are hidden"
    for loop, text in zip(loops, texts, strict=True):
        assert text.count("MUFU.TANH") == 64 * sizes.keys // 128
        assert text.count("HGMMA") == dim // 16 + sizes.keys // 16
        assert "STL" not in text and "LDL" not in text
        if "FSEL" in text:  # a strip sees one or two such blocks, behind all that is cached
            continue
        if sizes.strips == 2:
            check_loop(loop, dim, sizes.keys)
        else:
            assert text.count("WARPGROUP.DEPBAR") == 1
            assert text.rindex("HGMMA") < text.index("WARPGROUP.DEPBAR") < text.index("MUFU.TANH")
