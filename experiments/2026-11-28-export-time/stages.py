"""Measures the CPU seconds of each stage of an export's compilation, with the captured graph as it is and made smaller.

    python experiments/2026-11-28-export-time/stages.py --run-dir RUN --output FOLDER

The flags are those of `recsys export`. The scoring graph is captured and compiled twice in each way, in turn, and no
package is written.
"""

import copy
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.cpp_builder as cpp_builder
import torch._inductor.graph as graph

from recsys import environment

environment.import_torchrec_quietly()

from recsys import export  # noqa: E402
from recsys.inference import compiler  # noqa: E402
from recsys.inference.graph_passes import shrink  # noqa: E402


def cpu() -> float:
    """Returns the CPU seconds of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(owner: Any, name: str, stage: str) -> None:
    """Prints the CPU seconds of each call of a function."""
    function = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        start = cpu()
        try:
            return function(*arguments, **keywords)
        finally:
            print(f"  {stage:28} {cpu() - start:6.1f} s", flush=True)

    setattr(owner, name, call)


def compile_twice(compile_package: Callable[..., Any]) -> Callable[..., None]:
    """Returns a function that compiles both forms of a captured program in turn, and then ends the process."""

    def run(captured: Any, package_path: Any, inductor_configs: dict[str, Any]) -> None:
        for _ in range(2):
            for form in ("as captured", "smaller"):
                program = copy.deepcopy(captured)
                start = cpu()
                if form == "smaller":
                    shrink(program)
                print(f"{form}: {len(program.graph.nodes)} nodes", flush=True)
                with (
                    tempfile.TemporaryDirectory() as folder,
                    (Path(folder) / "program.pt2").open("wb") as file,
                ):
                    compile_package(program, package_path=file, inductor_configs=inductor_configs)
                print(f"{form}: {cpu() - start:.1f} s in all", flush=True)
        raise SystemExit

    return run


timed(torch.export, "export", "torch.export")
timed(compile_fx, "aot_export_module", "decomposition")
timed(graph.GraphLowering, "run", "lowering")
timed(graph.GraphLowering, "codegen", "scheduling, code generation")
timed(cpp_builder.CppBuilder, "build", "a C++ compilation or link")
torch._inductor.aoti_compile_and_package = compile_twice(torch._inductor.aoti_compile_and_package)
compiler.shrink = lambda captured: None
sys.exit(export.main())
