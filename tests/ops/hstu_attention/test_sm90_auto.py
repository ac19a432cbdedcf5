"""When "auto" takes the Hopper backend: for what has passed on a GPU as it stands. Needs no Triton."""

import pytest
import torch

from recsys.ops import AttentionMask, triton_backend
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.dispatch import Support
from recsys.ops.hstu_attention import sm90


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(triton_backend, "support", lambda device, dtype: Support(True))
    monkeypatch.setattr(sm90, "_missing_from_the_machine", lambda: "")


@pytest.mark.parametrize(
    ("dim", "needs_grad", "deterministic", "taken"),
    [
        (64, True, False, True),
        (128, True, False, True),
        (128, True, True, False),
        (128, False, True, True),
        (256, True, False, False),
        (256, False, False, True),
    ],
)
def test_gradients_in_two_passes_are_for_those_who_name_them(dim, needs_grad, deterministic, taken):
    facts = AttentionFacts(
        "cuda", torch.bfloat16, 4, dim, dim, AttentionMask(), False, needs_grad, deterministic
    )
    support = sm90.supports(facts)
    assert support.ok and support.auto == taken


def test_a_graph_is_for_those_who_name_it(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    facts = AttentionFacts("cuda", torch.bfloat16, 4, 64, 64, AttentionMask(), False, True, False)
    assert sm90.supports(facts) == Support(True, auto=False)
