"""Implements the checks of `recsys.doctor`, from versions to training and exporting tiny models.

Each check imports its libraries when it runs, because the import itself may fail.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from recsys import environment
from recsys.errors import InstallationError

REINSTALL = f"{sys.executable} -m recsys.install"
FAILURES = (
    ImportError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    subprocess.SubprocessError,
    InstallationError,
)


class CheckResult(NamedTuple):
    """One line of the report.

    Attributes:
        state: "ok", "warning" (something will not work or will be slow) or "error" (training will not work).
        remedy: the line to type; empty if there is nothing to do.
    """

    state: str
    name: str
    detail: str
    remedy: str = ""


class WrongResult(RuntimeError):
    """An error that says that a check computed a wrong result."""


def diagnose(*, quick: bool = False) -> Iterator[CheckResult]:
    """Runs every check, cheap ones first, and yields each finding as soon as it is known.

    Args:
        quick: leave out compiling and loading a package (about half a minute).
    """
    yield CheckResult(
        "ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield from check_versions(environment.versions())
    yield attempt("config language", compare_protos, environment.COMPILE_PROTOS)
    yield from check_driver(environment.versions(), environment.driver_version())
    cxx = environment.find_cxx()
    yield check_compiler(cxx)
    if environment.installed_version("torch") is None:
        return  # All checks below would fail for the same reason.
    yield attempt("fbgemm", run_fbgemm, REINSTALL)
    yield attempt("device", describe_device, REINSTALL)
    yield from check_ptxas()
    yield attempt("ops", explain_ops, REINSTALL)
    yield attempt("forward and backward", train_a_step, REINSTALL)
    if cxx is not None and not quick:
        yield attempt(
            "package", compile_a_package, "CXX=/usr/bin/g++ " + f"{sys.executable} -m recsys.doctor"
        )


def attempt(name: str, check: Callable[[], str], remedy: str) -> CheckResult:
    """Runs a check, which returns its detail; an exception becomes an error with `remedy`."""
    try:
        return CheckResult("ok", name, check())
    except FAILURES as failure:
        # An InstallationError advises running the doctor, which is running already, so report its cause.
        error = failure.__cause__ if isinstance(failure, InstallationError) else failure
        first_line = next(iter(str(error).strip().splitlines()), "")
        return CheckResult("error", name, f"{type(error).__name__}: {first_line}", remedy)


def check_versions(versions: dict[str, str]) -> Iterator[CheckResult]:
    """Compares the installed torch, fbgemm and torchrec with the versions that were tested together."""
    torch = versions.get("torch")
    if torch is None:
        yield CheckResult("error", "torch", "not installed", REINSTALL)
        return
    row = environment.tested_row(torch)
    if row is None:
        tested = ", ".join(row.torch for row in environment.TESTED)
        yield CheckResult(
            "error", "torch", f"{torch}; tested: {tested}", f"pip uninstall -y torch && {REINSTALL}"
        )
        return
    yield CheckResult("ok", "torch", torch)
    for name, wanted in (("fbgemm-gpu", row.fbgemm), ("torchrec", row.torchrec), ("torchmetrics", "1.0.3")):
        installed = versions.get(name, "not installed")
        right = installed.split("+")[0] == wanted
        detail = installed if right else f"{installed}; torch {row.torch} needs {wanted}"
        yield CheckResult("ok" if right else "error", name, detail, "" if right else REINSTALL)


def compare_protos() -> str:
    """Checks that the config language was compiled from the `.proto` files beside it."""
    if environment.protos_differ():
        raise WrongResult("recsys/protos is out of date: protos/ has changed since it was compiled")
    return "compiled"


def check_driver(versions: dict[str, str], driver: str | None) -> Iterator[CheckResult]:
    """Checks that FBGEMM's build fits: the CUDA build needs a driver, and the CPU build ignores a GPU."""
    fbgemm = versions.get("fbgemm-gpu")
    if fbgemm is None:
        return
    cpu_build = fbgemm.endswith("+cpu")
    if driver is not None and cpu_build:
        detail = "an NVIDIA driver is installed, but fbgemm is the CPU build: GPUs stay idle"
        remedy = REINSTALL
        if versions.get("torch", "").endswith("+cpu"):
            remedy = f"pip uninstall -y torch && {REINSTALL}"
        yield CheckResult("warning", "driver", detail, remedy)
    elif driver is None and not cpu_build:
        yield CheckResult(
            "error", "driver", "none, and fbgemm's CUDA build does not load without one", REINSTALL
        )
    else:
        yield CheckResult(
            "ok", "driver", "NVIDIA driver" if driver else "no NVIDIA driver: everything runs on the CPU"
        )


def check_compiler(cxx: str | None) -> CheckResult:
    """Checks that there is a C++ compiler, which `recsys.export` needs."""
    if cxx is None:
        detail = "no C++ compiler ($CXX, g++, clang++): recsys.export cannot work"
        return CheckResult("warning", "C++ compiler", detail, "apt install g++")
    return CheckResult("ok", "C++ compiler", f"{cxx} {environment.tool_version(cxx)}")


def check_ptxas() -> Iterator[CheckResult]:
    """Checks the assembler: the ptxas of Triton 3.6 and 3.7 miscompiles some Hopper code; 13.3 does not."""
    environment.prefer_packaged_ptxas()
    path = environment.find_ptxas()
    if environment.driver_version() is None:
        return
    if path is None:
        named = os.environ.get("TRITON_PTXAS_PATH")
        if named:
            detail = f"TRITON_PTXAS_PATH names {named}, which cannot be run: kernels cannot be compiled"
            yield CheckResult("warning", "ptxas", detail, environment.newer_ptxas())
        return
    version = environment.tool_version(path)
    if environment.version_numbers(version) >= environment.MINIMAL_PTXAS:
        yield CheckResult("ok", "ptxas", f"{version} ({path})")
        return
    detail = f"{version or 'unknown version'} ({path}); before 13.3 it miscompiles some kernels on Hopper"
    yield CheckResult("warning", "ptxas", detail, environment.newer_ptxas())


def describe_device() -> str:
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}"
    if environment.driver_version() is not None:
        raise WrongResult("an NVIDIA driver is installed, but torch sees no GPU")
    return f"CPU, {torch.get_num_threads()} threads"


def run_fbgemm() -> str:
    import torch

    environment.import_torchrec_quietly()
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([3, 0, 2]))
    if offsets.tolist() != [0, 3, 3, 5]:
        raise WrongResult(f"offsets of lengths 3, 0, 2 came out as {offsets.tolist()}")
    return "operators load and run"


def explain_ops() -> str:
    """Lists the backends of each op on this machine, for a small batch in float32 and in bfloat16."""
    import torch

    from recsys import ops

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout = ops.SequenceLayout(torch.tensor([3, 2], device=device))
    tables = []
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.zeros(5, 2, 16, dtype=dtype, device=device)
        row, scale = q.flatten(1), torch.ones(32, device=device)
        square, place = torch.zeros(32, 32, device=device), torch.zeros(5, dtype=torch.int64, device=device)
        table_kinds = (
            ops.explain("hstu_attention", q, q, q, layout, scale_len=8),
            ops.explain("hstu_attention_cached", q, q, q, layout, q, q, layout, scale_len=8),
            ops.explain("softmax_attention", q, q, q, layout),
            ops.explain("cross_attention", q, q, q, layout, layout),
            ops.explain("linear_attention", q, q, q, q, layout),
            ops.explain("gated_norm", row, row, scale, scale),
            ops.explain("linear_logp", row, row, place),
            ops.explain("norm_linear", row, scale, scale, square, scale, [16, 16]),
            ops.explain("top_k", row.float(), row, 2, removed=place[:0], removed_lengths=0 * place),
            ops.explain("gather_rows", [row, row], place),
            ops.explain("bucket_embedding", row, [row], [place]),
        )
        tables += [f"{dtype}: {kind}" for kind in table_kinds]
    return "\n".join(tables)


def train_a_step() -> str:
    """Trains FBGEMM embeddings through attention and a loss; the gradient must be finite and not zero."""
    import torch

    from recsys import ops

    torchrec = environment.import_torchrec_quietly()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = torchrec.EmbeddingConfig(name="item", embedding_dim=16, num_embeddings=10, feature_names=["item"])
    embedding = torchrec.EmbeddingCollection(tables=[table], device=device)
    lengths = torch.tensor([3, 2], device=device)
    ids = torch.tensor([1, 2, 3, 4, 5], device=device)
    jagged = torchrec.KeyedJaggedTensor(keys=["item"], values=ids, lengths=lengths)
    rows = embedding(jagged)["item"].values().view(5, 1, 16)
    loss = ops.hstu_attention(rows, rows, rows, ops.SequenceLayout(lengths), scale_len=4).square().sum()
    loss.backward()
    norm = next(embedding.parameters()).grad.norm().item()
    if not math.isfinite(norm) or norm == 0:
        raise WrongResult(f"the gradient's norm is {norm}")
    return f"embedding and attention on {device.type}, gradient norm {norm:.3g}"


def compile_a_package() -> str:
    """Compiles a function as `recsys export` does, loads it, and compares its answer with eager mode."""
    import torch

    from recsys import protos as pb
    from recsys.inference.compiler import compile_graph
    from recsys.inference.program import Program
    from recsys.models.signature import TensorSpec

    class Tiny(torch.nn.Linear):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(super().forward(inputs[0]))

    model, specs = Tiny(4, 4).eval(), [TensorSpec("x", torch.float32, ("rows", "4"))]
    rows = torch.linspace(-1, 1, 3 * 4).view(3, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.pt2"
        compile_graph(model, specs, (torch.zeros(2, 4),), path, pb.Pipeline())
        (answer,) = Program(path, specs, torch.device("cpu"))([rows])
        if not torch.allclose(answer, model(rows), atol=1e-5):
            raise WrongResult("a compiled package disagrees with the model that it was made from")
    return "compiled, loaded, equal to eager"
