"""The Hopper kernel compiled and assembled for sm_90a, without a GPU: registers, instructions, their order.

The mask with everything in it and other sizes to choose from with `--slow`. Skips without Triton.
"""

import os
import re
from pathlib import Path

import pytest

from recsys import environment

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)
if not triton.__version__.startswith("3.6."):
    pytest.skip("the kernel is written in the Gluon of Triton 3.6", allow_module_level=True)

from recsys.ops import AttentionMask  # noqa: E402
from recsys.ops.hstu_attention.hopper import launch  # noqa: E402
from recsys.ops.hstu_attention.hopper.launch import LONG_SIZES, SIZES  # noqa: E402
from tests.tools.assembled import SHARED_MEMORY, Assembled, assemble  # noqa: E402

SPILLED = 128
"""Bytes that may be: numbers of a tile, far from the loops over blocks."""

OTHER_SIZES = [
    pytest.param(64, SIZES[64]._replace(keys=128, stages=3)),
    pytest.param(128, SIZES[128]._replace(keys=128, stages=2)),
]
MASKS = {"causal": (False, False, False, True), "everything": (True, True, True, True)}
CASES = [
    *(pytest.param(dim, sizes, "causal", id=f"{dim}") for dim, sizes in SIZES.items()),
    *(pytest.param(dim, sizes, "causal", id=f"{dim}-long") for dim, sizes in LONG_SIZES.items()),
    *(
        pytest.param(dim, SIZES[dim], "everything", id=f"{dim}-masks", marks=pytest.mark.slow)
        for dim in SIZES
    ),
    *(
        pytest.param(dim, sizes, "everything", id=f"{dim}-long-masks", marks=pytest.mark.slow)
        for dim, sizes in LONG_SIZES.items()
    ),
    *(
        pytest.param(*case.values, "causal", id=f"{case.values[0]}-other-{i}", marks=pytest.mark.slow)
        for i, case in enumerate(OTHER_SIZES)
    ),
]


def compiled(dim, sizes, mask, folder: Path) -> Assembled:
    function = launch.forward_kernel
    windowed, target_window, grouped, reads = MASKS[mask]
    constants = {
        "D": dim,
        "BLOCK_N": sizes.keys,
        "STAGES": sizes.stages,
        "STRIPS": sizes.strips,
        "WINDOWED": windowed,
        "TARGET_WINDOW": target_window,
        "GROUPED": grouped,
        "CONTEXTUAL_READS": reads,
        "HELD": sizes.held,
        "OUT_IN_Q": sizes.out_in_q,
        "Q_TILES": sizes.q_tiles,
        "COMPUTING_REGISTERS": sizes.computing_registers,
        "LOADING_REGISTERS": sizes.loading_registers,
    }
    rows = {"q_desc": 64, "o_desc": 64, "k_desc": sizes.keys, "v_desc": sizes.keys}
    return assembled(function, constants, rows, folder)


def assembled(function, constants, rows, folder: Path, others: dict[str, str] | None = None) -> Assembled:
    """`rows`: of the boxes of each descriptor, which have all columns of a head; `others`: types of more."""
    types = {"items": "*i64", "counter": "*i32", "half_alpha": "fp32", "inverse_scale": "fp32"}
    boxes = {name: (1, 1, n, constants["D"]) for name, n in rows.items()}
    return assemble(function, types | (others or {}), constants, folder, other="i32", boxes=boxes)


@pytest.mark.parametrize(("dim", "sizes", "mask"), CASES)
def test_it_fits_and_nothing_waits_that_need_not(dim, sizes, mask, tmp_path):
    made = compiled(dim, sizes, mask, tmp_path)
    registers = sizes.strips * sizes.computing_registers + sizes.loading_registers
    check_resources(made, registers)
    loops = product_loops(made.sass)
    assert len(loops) == 2 * sizes.strips, "a loop with and one without a mask, for each strip"
    for loop in loops:
        check_loop(loop, dim, sizes.keys)
    assert sum("FSEL" in " ".join(loop) for loop in loops) == sizes.strips, (
        "only the loops with a mask select"
    )


@pytest.mark.parametrize("mask", ["causal", pytest.param("everything", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", launch.BACKWARD_SIZES)
def test_the_backward_fits_and_its_loops_keep_their_numbers(dim, mask, tmp_path):
    from triton.experimental.gluon import language as gl

    sizes, keys = launch.BACKWARD_SIZES[dim], 64 * launch.BACKWARD_STRIPS
    names = ("WINDOWED", "TARGET_WINDOW", "GROUPED", "CONTEXTUAL_READS")
    constants = launch.constants_of(sizes, AttentionMask()) | {"D": dim}
    constants |= dict(zip(names, MASKS[mask], strict=True))
    del constants["num_warps"]
    rows = {"q_desc": sizes.rows, "g_desc": sizes.rows, "k_desc": keys, "v_desc": keys}
    rows |= {"dk_desc": 64, "dv_desc": 64}
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
    part = f"tensordesc<fp32[1,1,{sizes.rows},{dim // 2}],{layout!r}>"
    made = assembled(launch.backward_kernel, constants, rows, tmp_path, {"dq_desc": part})
    assert made.shared <= SHARED_MEMORY
    assert "serializ" not in made.report, made.report
    assert "UTMAREDG.4D.ADD" in made.sass
    # Triton's barriers of a warp group; those of the strips have numbers from 4 on.
    assert all(int(number, 0) < 4 for number in re.findall(r"BAR\.SYNC\S* (\w+), 0x80", made.sass))
    # Products of a block: scores, dO V^T, a part of dQ, dV and dK. The second strip has in its loop with a
    # mask the way past rows that see nothing of it as well, with a part of dQ of its own.
    loops = product_loops(made.sass)
    assert len(loops) == 2 * launch.BACKWARD_STRIPS
    part, others = keys // 16, 2 * dim // 16 + 2 * sizes.rows // 16
    texts = [" ".join(loop) for loop in loops]
    ways = [(text.count("HGMMA") - others) // part for text in texts]
    assert sorted(ways) == [1, 1, 1, 2]
    for loop, text, way in zip(loops, texts, ways, strict=True):
        assert text.count("HGMMA") == others + way * part
        assert text.count("MUFU.TANH") >= 32
        # dV and dK take their left operand from registers, and without a mask what is held of the keys.
        from_registers = re.findall(r"HGMMA\S+ R\d+, R\d+, gdesc", text)
        assert len(from_registers) == 2 * sizes.rows // 16 + ("FSEL" not in text) * sizes.held // 16
        # The stack is in the second-level cache: a read takes hundreds of cycles.
        moves = [line for line in loop if re.match(r"(@!?U?P\w+ )?(STL|LDL)", line)]
        assert not moves, moves
        # dS and the part of dQ, 16 bytes of each row at a time: without conflicts of banks.
        assert text.count("STSM.16.M88.4") == way * (4 + dim // 16) and "STS." not in text


def check_resources(made, registers):
    """`registers`: of one thread of each warp group, added up."""
    assert made.shared <= SHARED_MEMORY
    assert "serializ" not in made.report, made.report
    assert registers * 128 <= 65536
    if (
        environment.version_numbers(environment.tool_version(environment.find_ptxas()))
        >= environment.MINIMAL_PTXAS
    ):
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", made.report)
        assert max(map(int, spilled.groups())) <= SPILLED, made.report
    assert "UTMALDG.4D" in made.sass and "UTMASTG.4D" in made.sass


def product_loops(sass):
    """The innermost loops with matrix instructions."""
    return [loop for loop in inner_loops(sass) if any("HGMMA" in line for line in loop)]


def check_loop(loop, dim, keys):
    """The products of a block are started together; its weights are computed before the sum is waited for."""
    names = [re.sub(r"^@!?U?P\w+ ", "", line).split()[0] for line in loop]
    assert names.count("MUFU.TANH") == 64 * keys // 128
    assert sum(name.startswith("HGMMA") for name in names) == dim // 16 + keys // 16
    assert not any(name.startswith(("STL", "LDL")) for name in names)
    waits = [i for i, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
    tanh = [i for i, name in enumerate(names) if name == "MUFU.TANH"]
    products = [i for i, name in enumerate(names) if name.startswith("HGMMA")]
    assert len(waits) == 2 and products[-1] < waits[0] < tanh[0] and tanh[-1] < waits[1]


def inner_loops(sass):
    """The instructions of each loop that has none in it, [[str]]."""
    program, labels = [], {}
    for line in sass.split("\n"):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(program)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            program.append(instruction.group(1))
    jumps = []
    for i, instruction in enumerate(program):
        if target := re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction):
            jumps.append((labels[target.group(1)], i))
    # The cold second half of a wait is at the end of the program and jumps back over everything: no loop.
    back = [(start, end) for start, end in jumps if start <= end and end - start < 2500]
    return [
        program[start : end + 1]
        for start, end in back
        if not any((start, end) != other and start <= other[0] and other[1] <= end for other in back)
    ]
