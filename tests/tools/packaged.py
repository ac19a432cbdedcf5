"""Packages of AOTInductor that run where this code is not: in a fresh process that imports torch only."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

RUN = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
torch.set_num_threads(1)
program, batches = torch._inductor.aoti_load_package(sys.argv[1]), torch.load(sys.argv[2])
def run(batch):
    if batch[0].is_cuda:
        torch.cuda.current_stream().query()  # kernels of a package need a context in their thread
    return program(*batch)
with ThreadPoolExecutor(4) as pool:
    outputs = list(pool.map(run, batches * 20))
torch.save(outputs, sys.argv[3])
"""


def assert_packaged(
    program: torch.export.ExportedProgram,
    model: Callable[..., Any],
    batches: list,
    folder: Path,
    atol: float = 1e-6,
) -> None:
    """The packaged program returns what `model` does for each batch, 20 times over, in 4 threads.

    A deadlock would keep the process past its time. Takes about 30 s, nearly all of it in the C++ compiler.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "/usr/bin/g++")
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(folder / "model.pt2"),
            inductor_configs={"aot_inductor.check_lowerbound": False, "shape_padding": False},
        )
    torch.save(batches, folder / "batches")
    arguments = [package, str(folder / "batches"), str(folder / "outputs")]
    subprocess.run([sys.executable, "-c", RUN, *arguments], check=True, cwd=folder, timeout=120)
    expected = [model(*batch) for batch in batches]
    for got, want in zip(torch.load(folder / "outputs"), expected * 20, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=atol)
