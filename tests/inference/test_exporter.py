"""What an export compiles for, and what it says when the package that it made does not run."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from recsys import protos as pb
from recsys.inference.exporter import instruction_set, why_it_failed


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: a word\n", "ValueError: a word"),
        (
            "a warning\nRuntimeError: index out of bounds: 0 <= tmp2 < 2L\n"
            "Exception raised from kernel.cpp:115 (most recent call first):\n<omitting python frames>\n"
            "frame #45: _start + 0x21 (0x565132dfc081 in python)\n\n",
            "RuntimeError: index out of bounds: 0 <= tmp2 < 2L",
        ),
        ("Segmentation fault\n", "Segmentation fault"),
        ("", "it ended with -11 and no message"),
    ],
)
def test_the_error_of_a_process_is_found_among_what_it_wrote(stderr, why):
    assert why_it_failed(subprocess.CompletedProcess([], -11, "", stderr)) == why


@pytest.mark.parametrize(
    "inductor, wanted", [(SimpleNamespace(march=None), "x86-64-v2"), (SimpleNamespace(), "native")]
)
def test_the_instruction_set_is_the_config_s_where_pytorch_can_be_told(monkeypatch, inductor, wanted):
    monkeypatch.setattr(torch._inductor, "config", SimpleNamespace(cpp=inductor))
    pipeline = pb.Pipeline()
    pipeline.export.march = "x86-64-v2"
    assert instruction_set(pipeline) == wanted
