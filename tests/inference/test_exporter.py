"""An export spares what is no package, and says why the package that it made does not run."""

import signal
import subprocess

import pytest
import torch

from recsys import files
from recsys import protos as pb
from recsys.errors import RecsysError
from recsys.inference.exporter import ExportSource, export
from recsys.inference.program import PackageError
from recsys.inference.trial import Trial, why_it_failed
from recsys.models import build_model
from tests.modules.pipelines import RANKER, batch_of, pipeline_of, random_rows


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
        (
            "Error: CUDA driver error: out of memory\nTraceback (most recent call last):\n  File x\n"
            "RuntimeError: run_func_(...) API call failed\n",
            "RuntimeError: run_func_(...) API call failed: CUDA driver error: out of memory",
        ),
        ("Segmentation fault\n", "Segmentation fault"),
        ("", "it ended with -11 and no message"),
    ],
)
def test_the_error_of_a_process_is_found_among_what_it_wrote(stderr, why):
    assert why_it_failed(subprocess.CompletedProcess([], -11, "", stderr)) == why


def refused(folder) -> str:
    """The error of an export to a folder; nothing in it may have changed."""
    before = {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()}
    with pytest.raises(PackageError) as caught:
        export(ExportSource(pb.Pipeline(), torch.nn.Identity(), 1, []), folder)
    assert {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()} == before
    return str(caught.value)


def test_an_export_replaces_nothing_but_a_package(tmp_path):
    run = tmp_path / "run"
    state = run / "checkpoints" / "step-00000010"
    state.mkdir(parents=True)
    (state / "state.json").write_text("{}")
    files.write_manifest(state)
    assert refused(run) == f"{run} is not empty and holds no package: give another --output"
    # A state has a manifest that names all of its files, too.
    assert refused(state) == f"{state} is not empty and holds no package: give another --output"
    assert "is a file, and a package is a folder" in refused(state / "state.json")


def test_an_export_does_not_replace_a_package_with_other_things_in_it(tmp_path):
    folder = tmp_path / "export"
    (folder / "predictions").mkdir(parents=True)
    (folder / "package.json").write_text("{}")
    files.write_manifest(folder)
    part = folder / "predictions" / "part-0.parquet"
    part.write_text("mine")
    assert refused(folder).startswith(f"{part} is not part of the package in {folder}")


def test_a_comparison_of_nothing_proves_nothing(tmp_path):
    """Rows without candidates have no scores that could differ."""
    pipeline = pipeline_of(RANKER, "data { validation { synthetic {} } }")
    model = build_model(pipeline).eval()
    batch = batch_of(pipeline, random_rows(pipeline, [(3, 0), (4, 0), (0, 0)]))
    with pytest.raises(RecsysError, match="have no candidates, so nothing would be compared"):
        export(ExportSource(pipeline, model, 1, [batch]), tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_the_process_of_a_trial_ends_with_its_block(tmp_path):
    """As when the package cannot be compiled: the process would wait for a package that nobody makes."""
    with pytest.raises(RecsysError), Trial(tmp_path, []) as trial:
        raise RecsysError
    assert trial._process.returncode == -signal.SIGKILL
