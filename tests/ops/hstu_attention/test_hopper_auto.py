"""When "auto" takes the Hopper backend: for what has passed on a GPU as it stands. Needs no Triton."""

import dataclasses

import pytest
import torch

from recsys.ops import AttentionMask
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.hstu_attention import WIDTHS, supports_sm90
from recsys.ops.runtime import embedding, triton_support
from recsys.ops.runtime.dispatch import Support


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(triton_support, "support", lambda device, dtype: Support(True))
    monkeypatch.setattr(triton_support, "missing_for_hopper", lambda: "")


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", WIDTHS)
def test_it_is_taken_for_all_widths_with_and_without_gradients(dim, deterministic, needs_grad):
    facts = AttentionFacts(
        "cuda", torch.bfloat16, 4, dim, dim, AttentionMask(), False, needs_grad, deterministic
    )
    assert supports_sm90(facts) == Support(True)


def test_it_is_taken_in_compiled_graphs_and_in_exports_that_embed_kernels(monkeypatch):
    facts = AttentionFacts("cuda", torch.bfloat16, 4, 64, 64, AttentionMask(), False, True, False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert supports_sm90(facts) == Support(True)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert supports_sm90(facts) == Support(False, "only recsys.export can embed it in a package")
    monkeypatch.setattr(embedding, "_KERNELS", {})
    for problem in ("", "PyTorch 2.99 compiles packages in a way that is not known"):
        monkeypatch.setattr(embedding, "_unknown_pytorch", lambda problem=problem: problem)
        with embedding.embedding():
            assert supports_sm90(facts) == Support(not problem, problem)
            biased = dataclasses.replace(facts, has_bias=True)
            assert supports_sm90(biased) == Support(False, "it has no relative bias")
