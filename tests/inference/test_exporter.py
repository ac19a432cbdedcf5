"""What an export says when the package that it made does not run."""

import subprocess

import pytest

from recsys.inference.exporter import why_it_failed


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
