"""The emulator of Hopper kernels, for a test that asks for it."""

import pytest
import torch


@pytest.fixture
def emulated(monkeypatch):
    """The kernels run in the emulator, on three processors; memory for gradients holds NaN."""
    pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
    from recsys.ops.hstu_attention import Problem
    from recsys.ops.hstu_attention.cached import hopper as cached_launch
    from recsys.ops.hstu_attention.hopper import backward, forward, two_pass
    from recsys.ops.runtime import hopper_launch
    from tests.tools.gluon_emulator import Emulated

    for module, names in (
        (forward, ("forward_kernel",)),
        (backward, ("backward_kernel",)),
        (two_pass, ("keys_kernel", "wide_keys_kernel", "rows_kernel")),
        (cached_launch, ("candidates_kernel",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Emulated(getattr(module, name)))
    monkeypatch.setattr(hopper_launch, "num_processors", lambda device: 3)
    monkeypatch.setattr(
        Problem, "gradient_memory", lambda _, *given: [torch.full_like(tensor, torch.nan) for tensor in given]
    )
