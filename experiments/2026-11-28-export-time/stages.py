"""Measures the CPU seconds of each stage of an export's compilation, with the captured graph as it is and made smaller.

    python experiments/2026-11-28-export-time/stages.py --run-dir RUN --output FOLDER
    python experiments/2026-11-28-export-time/stages.py --whole --run-dir RUN --output FOLDER

The flags are those of `recsys export`. The scoring graph is captured and compiled twice in each way, in turn, and no
package is written. With --whole, the package is written as usual, and the seconds of each stage on the clock and of CPU
are printed; stages of a GPU's packages are among them. With --untuned, each of Inductor's kernels has one launch only;
with --compiled-launchers, Triton compiles one in C for each.
"""

import copy
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor import async_compile, codecache, compile_fx, cpp_builder, graph
from torch._inductor.codegen import cpp_wrapper_gpu
from torch._inductor.runtime import triton_heuristics

from recsys import environment

environment.import_torchrec_quietly()

from recsys import export  # noqa: E402
from recsys.inference import compiler, corrected_inductor, exporter  # noqa: E402
from recsys.inference.graph_passes import shrink  # noqa: E402


def cpu() -> float:
    """Returns the CPU seconds of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


BEGIN = time.perf_counter()


def timed(owner: Any, name: str, stage: str, least: float = 0.0) -> None:
    """Prints the seconds of each call of a function that takes at least `least` seconds: when it ended, its time on the
    clock, and its CPU time."""
    function = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        start, clock = cpu(), time.perf_counter()
        try:
            return function(*arguments, **keywords)
        finally:
            now = time.perf_counter()
            if now - clock >= least:
                print(f"  {stage:34} {now - BEGIN:6.1f} s: {now - clock:6.1f} s, CPU {cpu() - start:6.1f} s", flush=True)

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
if "--untuned" in sys.argv:
    sys.argv.remove("--untuned")
    settings = compiler._settings
    compiler._settings = lambda *given: {**settings(*given), "triton.autotune_pointwise": False}
if "--compiled-launchers" in sys.argv:
    sys.argv.remove("--compiled-launchers")
    corrected_inductor._general_launchers = lambda compiled: compiled
if "--whole" in sys.argv:
    sys.argv.remove("--whole")
    timed(cpp_wrapper_gpu.CppWrapperGpu, "generate_and_run_autotune_block", "kernels compiled and tuned")
    timed(async_compile.AsyncCompile, "wait", "waiting for compiled kernels")
    timed(triton_heuristics.CachingAutotuner, "precompile", "a kernel compiled or loaded", least=0.3)
    timed(triton_heuristics.CachingAutotuner, "run", "a kernel run", least=0.3)
    timed(codecache.AotCodeCompiler, "compile", "all C++ and packing")
    timed(torch._inductor, "aoti_compile_and_package", "aoti_compile_and_package")
    timed(exporter, "_prove", "comparison in a fresh process")
else:
    torch._inductor.aoti_compile_and_package = compile_twice(torch._inductor.aoti_compile_and_package)
    compiler.shrink = lambda captured: None
sys.exit(export.main())
