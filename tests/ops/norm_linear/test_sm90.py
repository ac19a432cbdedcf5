"""The Hopper kernel of a projection that goes through SiLU, without a GPU: its logic in the emulator, what
the assembler says."""

import os

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the kernel is not one of Triton's interpreter", allow_module_level=True)
if not triton.__version__.startswith("3.6."):
    pytest.skip("the kernel is written in the Gluon of Triton 3.6", allow_module_level=True)

from recsys.ops.norm_linear import sm90_launch  # noqa: E402
from tests.ops.linear_logp.test_hopper_compile import assembled  # noqa: E402
from tests.tools.gluon_emulator import Emulated  # noqa: E402

SHARED_MEMORY = 227 * 1024


@pytest.mark.parametrize("shape", [(300, 256, 512), (1, 72, 520), (129, 64, 200), (0, 64, 256)])
def test_products_before_and_behind_silu(shape, monkeypatch):
    kernel = Emulated(sm90_launch.projection_kernel)
    monkeypatch.setattr(sm90_launch, "projection_kernel", kernel)
    rows, depth, columns = shape
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(size, generator=generator).bfloat16()
        for size in ((rows, depth), (columns, depth), (columns,))
    )
    want = x.double() @ weight.double().t() + bias.double()
    found = sm90_launch.project(x, weight, bias)
    torch.testing.assert_close(found.before.double(), want, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(found.active.double(), F.silu(want), rtol=2**-8, atol=1e-5)


def test_the_assembler_finds_room(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    strip = (sm90_launch.STRIP.value, sm90_launch.COLUMNS)
    boxes = {
        "x_desc": (sm90_launch.ROWS, sm90_launch.DEPTH),
        "weight_desc": (sm90_launch.COLUMNS, sm90_launch.DEPTH),
        **dict.fromkeys(("out_desc", "active_desc"), strip),
    }
    constants = {"STAGES": sm90_launch.STAGES}
    shared, report, loops = assembled(sm90_launch.projection_kernel, constants, boxes, tmp_path)
    assert shared <= SHARED_MEMORY
    assert "serializ" not in report and loops
    assert "0 bytes spill stores, 0 bytes spill loads" in report
