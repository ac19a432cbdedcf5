"""The Hopper kernels of `linear_logp` compiled and assembled for sm_90a, without a GPU: registers, shared
memory, and that exponentials stand in the shadow of the products.

Each kernel once; all widths, and that of sums for wide rows, with `--slow`. Skips without Triton.
"""

import pytest

from tests.tools.assembled import assemble, needs_gluon, opcodes

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
pytestmark = needs_gluon

from recsys.ops.linear_logp import hopper as hopper_ops  # noqa: E402
from recsys.ops.linear_logp import hopper_kernels  # noqa: E402

SPILLED = 64

FLOATS = ("scale", "maximum", "total", "top", "sign", "of_target", "grad_scale")
OTHERS = {"rows": "*i32", "marks": "*u8"}


def assembled(function, constants, boxes, folder):
    """The assembled kernel and its loops with products. `boxes` has rows and columns by name."""
    types = dict.fromkeys(FLOATS, "*fp32") | OTHERS
    types["grad"] = "*bf16" if constants.get("OF_WEIGHT") else "*fp32"
    constants = constants | {"num_warps": hopper_ops.WARPS}
    shapes = {name: (1, 1, *shape) for name, shape in boxes.items() if name in function.arg_names}
    made = assemble(function, types, constants, folder, other="i32", boxes=shapes)
    return made, made.product_loops


def check_resources(made, sizes, spilled=SPILLED):
    made.check_resources(sizes.strips * sizes.computing_registers + sizes.loading_registers, spilled)


def widths(table, usual):
    return [pytest.param(d, marks=[] if d == usual else pytest.mark.slow) for d in table]


@pytest.mark.parametrize("width", widths(hopper_ops.FORWARD, 128))
def test_the_sums(width, tmp_path):
    sizes = hopper_ops.FORWARD[width]
    boxes = {"owned_desc": (64, width), "streamed_desc": (sizes.others, width)}
    constants = hopper_ops.constants_of(sizes, width) | {"PIECES": 1}
    made, loops = assembled(hopper_kernels.forward_kernel, constants, boxes, tmp_path)
    check_resources(made, sizes)
    assert len(loops) == sizes.strips


@pytest.mark.parametrize("with_scale", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("of_weight", [False, True])
@pytest.mark.parametrize("width", widths(hopper_ops.GRADIENTS, 128))
def test_the_gradients(width, of_weight, with_scale, tmp_path):
    sizes = hopper_ops.GRADIENTS[width]
    if of_weight and with_scale:
        pytest.skip("there is no such kernel")
    boxes = {"owned_desc": (64, width), "streamed_desc": (sizes.others, width)}
    kind = {"OF_WEIGHT": of_weight, "HAS_TARGET": True, "WITH_SCALE": with_scale}
    constants = hopper_ops.constants_of(sizes, width) | kind
    made, loops = assembled(hopper_kernels.gradient_kernel, constants, boxes, tmp_path)
    # A learnable temperature takes registers for its sums.
    check_resources(made, sizes, 5 * SPILLED if with_scale else SPILLED)
    assert len(loops) == sizes.strips
    for loop in loops if width < 256 else []:  # there the assembler sinks them; the other strip's overlap
        check_shadow(opcodes(loop), width, sizes.others)


def check_shadow(names, width, others):
    """In both ways through the loop nearly all exponentials stand between the waits for the two products."""
    waits = [i for i, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
    assert names.count("MUFU.EX2") == 2 * 64 * others // 128 and len(waits) == 4
    assert sum(name.startswith("HGMMA") for name in names) == 2 * (width // 16 + others // 16)
    within = [i for i, name in enumerate(names) if name == "MUFU.EX2" and _between(i, waits)]
    assert len(within) >= 0.8 * names.count("MUFU.EX2")


def _between(i, waits):
    return waits[0] < i < waits[1] or waits[2] < i < waits[3]


WIDE = [
    pytest.param(hopper_kernels.forward_kernel, hopper_ops.WIDE_SUMS, marks=pytest.mark.slow),
    (hopper_kernels.score_grads_kernel, hopper_ops.WIDE_SCORE_GRADS),
]


@pytest.mark.parametrize(("kernel", "sizes"), WIDE)
def test_wide_rows(kernel, sizes, tmp_path):
    boxes = {"owned_desc": (64, 64), "streamed_desc": (sizes.others, 64), "out_desc": (64, sizes.others)}
    constants = hopper_ops.constants_of(sizes, 64) | {"PIECES": 8, "HAS_TARGET": True, "WITH_SCALE": False}
    made, loops = assembled(kernel, constants, boxes, tmp_path)
    check_resources(made, sizes)
    assert len(loops) == sizes.strips
