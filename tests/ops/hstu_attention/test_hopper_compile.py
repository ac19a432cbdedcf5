"""The Hopper kernels compiled and assembled for sm_90a, without a GPU: registers, instructions, their order.

Each kernel once, with the sizes of heads of 128, the forward one in `hopper/test_packaged.py`. With `--slow`
all sizes, the mask with everything in it, and groups of targets. Skips without Triton.
"""

import re
from pathlib import Path

import pytest

from recsys.ops import AttentionMask
from tests.tools.assembled import SHARED_MEMORY, Assembled, assemble, descriptor_type, needs_gluon, opcodes

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
pytestmark = needs_gluon

from recsys.ops.hstu_attention.cached import hopper as cached_launch  # noqa: E402
from recsys.ops.hstu_attention.hopper import backward, forward, two_pass  # noqa: E402
from recsys.ops.hstu_attention.hopper.forward import LONG_SIZES, SIZES  # noqa: E402

SPILLED = 128

MASKS = {
    "causal": AttentionMask(),
    "everything": AttentionMask(130, 70, True, 5),
}
MASKED = ["causal", pytest.param("everything", marks=pytest.mark.slow)]
OTHER_SIZES = [
    (64, SIZES[64]._replace(keys=128, stages=3)),
    (128, SIZES[128]._replace(keys=128, stages=2)),
]
FORWARD = [*SIZES.items(), *LONG_SIZES.items()]
FORWARD_CASES = [(*sizes, "causal") for sizes in [*FORWARD, *OTHER_SIZES]]
FORWARD_CASES += [(*sizes, "everything") for sizes in FORWARD]
CANDIDATES = [(128, cached_launch.SIZES[128]), (64, cached_launch.SIZES[64])]
CANDIDATES += cached_launch.LARGE_SIZES.items()


def first_of(cases):
    """All but the first case are slow."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (number > 0)) for number, case in enumerate(cases)]


def widths(table, *usual):
    """Head widths of a table of sizes; all but the usual ones are slow."""
    return [pytest.param(dim, marks=[pytest.mark.slow] * (dim not in usual)) for dim in table]


def assembled(function, constants, rows, folder: Path, others: dict[str, str] | None = None) -> Assembled:
    """`rows`: of the boxes of each descriptor, which have all columns of a head; `others`: types of more."""
    types = {"items": "*i64", "counter": "*i32", "half_alpha": "fp32", "inverse_scale": "fp32"}
    boxes = {name: (1, 1, n, constants["D"]) for name, n in rows.items()}
    made = assemble(function, types | (others or {}), constants, folder, other="i32", boxes=boxes)
    assert "UTMALDG.4D" in made.sass and "UTMASTG.4D" in made.sass
    return made


def registers_of(sizes) -> dict[str, int]:
    names = ("computing_registers", "loading_registers")
    return {name.upper(): getattr(sizes, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "sizes", "mask"), FORWARD_CASES)
def test_the_forward_fits_and_nothing_waits_that_need_not(dim, sizes, mask, tmp_path):
    """`hopper/test_packaged.py` checks the code of one of these sizes each time."""
    constants = {"D": dim, "BLOCK_N": sizes.keys, "STAGES": sizes.stages, "STRIPS": sizes.strips}
    constants |= {"HELD": sizes.held, "Q_TILES": sizes.q_tiles}
    constants |= registers_of(sizes) | forward.rules(MASKS[mask])
    rows = {"q_desc": 64, "o_desc": 64, "k_desc": sizes.keys, "v_desc": sizes.keys}
    made = assembled(forward.forward_kernel, constants, rows, tmp_path)
    made.check_resources(sizes.strips * sizes.computing_registers + sizes.loading_registers, SPILLED)
    loops = made.product_loops
    assert len(loops) == 2 * sizes.strips, "a loop with and one without a mask, for each strip"
    for loop in loops:
        check_loop(loop, dim, sizes.keys)
    assert sum("FSEL" in " ".join(loop) for loop in loops) == sizes.strips, "only loops with a mask select"


def check_loop(loop, dim, keys):
    """The products of a block are started together; its weights are computed before the sum is waited for."""
    names = opcodes(loop)
    assert names.count("MUFU.TANH") == 64 * keys // 128
    assert sum(name.startswith("HGMMA") for name in names) == dim // 16 + keys // 16
    assert not any(name.startswith(("STL", "LDL")) for name in names)
    waits = [i for i, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
    tanh = [i for i, name in enumerate(names) if name == "MUFU.TANH"]
    products = [i for i, name in enumerate(names) if name.startswith("HGMMA")]
    assert len(waits) == 2 and products[-1] < waits[0] < tanh[0] and tanh[-1] < waits[1]


@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("dim", widths(backward.BACKWARD_SIZES, 128))
def test_the_backward_fits_and_its_loops_keep_their_numbers(dim, mask, tmp_path):
    sizes, keys = backward.BACKWARD_SIZES[dim], 64 * backward.BACKWARD_STRIPS
    constants = backward.constants_of(sizes, MASKS[mask]) | {"D": dim}
    del constants["num_warps"]
    rows = {"q_desc": sizes.rows, "g_desc": sizes.rows, "k_desc": keys, "v_desc": keys}
    rows |= {"dk_desc": 64, "dv_desc": 64}
    part = descriptor_type("fp32", (1, 1, sizes.rows, dim // 2))
    made = assembled(backward.backward_kernel, constants, rows, tmp_path, {"dq_desc": part})
    assert made.shared <= SHARED_MEMORY and "serializ" not in made.report, made.report
    assert "UTMAREDG.4D.ADD" in made.sass
    # Triton's barriers of a warp group; those of the strips have numbers from 4 on.
    assert all(int(number, 0) < 4 for number in re.findall(r"BAR\.SYNC\S* (\w+), 0x80", made.sass))
    # Products of a block: scores, dO V^T, a part of dQ, dV and dK. The second strip has in its loop with a
    # mask the way past rows that see nothing of it as well, with a part of dQ of its own.
    loops = made.product_loops
    assert len(loops) == 2 * backward.BACKWARD_STRIPS
    part, others = keys // 16, 2 * dim // 16 + 2 * sizes.rows // 16
    texts = [" ".join(loop) for loop in loops]
    ways = [(text.count("HGMMA") - others) // part for text in texts]
    assert sorted(ways) == [1, 1, 1, 2]
    for loop, text, way in zip(loops, texts, ways, strict=True):
        assert text.count("HGMMA") == others + way * part
        assert text.count("MUFU.TANH") >= 32
        # dV and dK take their left operand from registers, and without a mask what is held of the keys.
        from_registers = re.findall(r"HGMMA\S+ R\d+, R\d+, gdesc", text)
        assert len(from_registers) == 2 * sizes.rows // 16 + ("FSEL" not in text) * 64 // 16
        # The stack is in the second-level cache: a read takes hundreds of cycles.
        moves = [line for line in loop if re.match(r"(@!?U?P\w+ )?(STL|LDL)", line)]
        assert not moves, moves
        # dS and the part of dQ, 16 bytes of each row at a time: without conflicts of banks.
        assert text.count("STSM.16.M88.4") == way * (4 + dim // 16) and "STS." not in text


def check_assembled(made, dim, block, num_loops, num_masked):
    """No spills in loops, the mask only where it is needed. Returns products and waits of each loop."""
    sizes = two_pass.SIZES[dim]
    made.check_resources(2 * sizes.computing_registers + sizes.loading_registers, SPILLED)
    names = [opcodes(loop) for loop in made.product_loops]
    assert len(names) == num_loops
    assert sum("FSEL" in loop for loop in names) == num_masked
    for loop in names:
        assert not any(name.startswith(("STL", "LDL")) for name in loop)
        assert loop.count("MUFU.TANH") in (0, 64 * block // 128)
    return [[name for name in loop if name.startswith(("HGMMA", "WARPGROUP.DEPBAR"))] for loop in names]


@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("dim", widths(two_pass.SIZES, 128, 256))
def test_tiles_of_keys_assembled(tmp_path, dim, mask):
    sizes = two_pass.SIZES[dim]
    chosen = {"D": dim, "BLOCK_M": sizes.rows, "STAGES": sizes.stages}
    chosen |= registers_of(sizes) | forward.rules(MASKS[mask])
    boxes = {"q_desc": sizes.rows, "g_desc": sizes.rows} | dict.fromkeys(("dk_desc", "dv_desc"), 64)
    if sizes.v_tiles == 0:
        boxes |= dict.fromkeys(("k_desc", "v_desc"), 64)
        made = assembled(two_pass.wide_keys_kernel, chosen, boxes, tmp_path)
        for loop in check_assembled(made, dim, sizes.rows, num_loops=3, num_masked=1):
            waits = [i for i, name in enumerate(loop) if name.startswith("WARP")]
            assert waits == [dim // 16, dim // 16 + 1 + sizes.rows // 16], (
                "one wait for each of the two products"
            )
        return
    chosen["V_STAGES"] = sizes.v_tiles
    boxes |= dict.fromkeys(("k_desc", "v_desc"), 128)
    made = assembled(two_pass.keys_kernel, chosen, boxes, tmp_path)
    for loop in check_assembled(made, dim, sizes.rows, num_loops=4, num_masked=2):
        waits = [i for i, name in enumerate(loop) if name.startswith("WARP")]
        both, sums = 2 * dim // 16, sizes.rows // 16
        assert waits == [both, both + 1 + sums, both + 2 + 2 * sums, both + 3 + 2 * sums], (
            "the first two products start together, the others while one before is under way"
        )


@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("dim", widths(two_pass.SIZES, 128))
def test_tiles_of_rows_assembled(tmp_path, dim, mask):
    sizes = two_pass.SIZES[dim]
    chosen = {"D": dim, "BLOCK_N": sizes.keys, "K_STAGES": sizes.k_stages, "V_STAGES": sizes.v_stages}
    chosen |= {"APART": sizes.apart} | registers_of(sizes) | forward.rules(MASKS[mask])
    boxes = dict.fromkeys(("q_desc", "g_desc", "dq_desc"), 64) | dict.fromkeys(
        ("k_desc", "v_desc"), sizes.keys
    )
    made = assembled(two_pass.rows_kernel, chosen, boxes, tmp_path)
    both = 2 * dim // 16
    for loop in check_assembled(made, dim, sizes.keys, num_loops=4, num_masked=2):
        waits = [i for i, name in enumerate(loop) if name.startswith("WARP")]
        assert waits == [both, both + 1, both + 2 + sizes.keys // 16], "the first two products start together"
    assert "MUFU.TANH" in made.sass


@pytest.mark.parametrize(
    ("dim", "sizes", "grouped"),
    first_of((*sizes, grouped) for grouped in (True, False) for sizes in CANDIDATES),
)
def test_candidates_fit_and_their_products_overlap(dim, sizes, grouped, tmp_path):
    constants = {"D": dim, "BLOCK_N": sizes.keys, "STAGES": sizes.stages, "STRIPS": sizes.strips}
    constants |= {"GROUPED": grouped} | registers_of(sizes)
    rows = {f"{name}_desc": sizes.keys for name in ("k", "v", "ck", "cv")} | {"q_desc": 64, "o_desc": 64}
    made = assembled(cached_launch.candidates_kernel, constants, rows, tmp_path)
    made.check_resources(sizes.strips * sizes.computing_registers + sizes.loading_registers, SPILLED)
    loops = made.product_loops
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
