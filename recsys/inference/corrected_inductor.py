"""Changes Inductor while it compiles a package: what takes long for nothing, and what goes wrong."""

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor import cpp_builder, cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, Grid2DWithYZOverflow
from torch.utils import cpp_extension

from recsys.ops.runtime.embedding import replaced

HEADER = "torch/csrc/inductor/aoti_runtime/model_base.h"
"""The header, part of each package's code, with PyTorch's only use of std::regex there."""

WITHOUT_REGEX = (
    ("#include <regex>\n", "#include <functional>\n#include <string>\n"),
    (
        """  std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");
  std::smatch sm;
  bool matched = std::regex_match(device_str, sm, re);
""",
        """  const size_t size = device_str.size();
  const size_t colon = std::min(device_str.find(':'), size);
  const std::string kind = device_str.substr(0, colon);
  const std::string number = device_str.substr(std::min(colon + 1, size));
  const bool matched = colon == size ||
      (!number.empty() && number.find_first_not_of("0123456789") == std::string::npos);
""",
    ),
    ("sm[1].str()", "kind"),
    ("sm[3].matched", "!number.empty()"),
    ("sm[3].str()", "number"),
)
"""Texts of the header, and texts in their place."""

MOST_ARGUMENTS = 100
"""Most arguments of a kernel for PyTorch's launcher, which has room for 120 with those that it adds."""


@contextmanager
def corrected_inductor() -> Iterator[None]:
    """Changes how Inductor compiles during the block; nothing of a package's results depends on it."""
    with ExitStack() as stack:
        if platform.machine() in ("x86_64", "AMD64"):
            stack.enter_context(replaced(cpu_vec_isa, "valid_vec_isa_list", _instruction_sets))
        if torch.cuda.is_available():
            from triton.runtime import driver

            launchers = _general_launchers(driver.active.launcher_cls)
            stack.enter_context(replaced(driver.active, "launcher_cls", launchers))
        stack.enter_context(replaced(CachingAutotuner, "run", _run_if_tuned))
        stack.enter_context(replaced(Grid2DWithYZOverflow, "generate", _generate_guarded))
        if (folder := _changed_headers()) is not None:
            stack.enter_context(replaced(cpp_builder, "_get_torch_related_args", _searching(folder)))
        yield


def _instruction_sets() -> list[cpu_vec_isa.VecISA]:
    """Returns those with vectors of `cpp.simdlen` bits. For each one that the processor has, Inductor would
    compile and run programs, for half a minute in all, even if `cpp.vec_isa_ok` is set."""
    return [cpu_vec_isa.VecAVX2()] if torch.cpu._is_avx2_supported() else []


class GeneralLauncher:
    """Launches a Triton kernel with PyTorch's launcher, which takes any arguments.

    Triton compiles a launcher in C for each kernel that it loads, .4 s each, and a package needs none: only
    those of kernels that are tuned are called. PyTorch itself has its launcher take their place except where
    it compiles C++.

    Args:
        source: what Triton compiled (an ASTSource).
        metadata: Triton's metadata of the compiled kernel.

    Raises:
        NotImplementedError, KeyError, AttributeError: PyTorch's launcher cannot launch such a kernel.
    """

    def __init__(self, source: Any, metadata: Any) -> None:
        self._kernel = StaticallyLaunchedCudaKernel(
            SimpleNamespace(src=source, metadata=metadata, asm={"cubin": b""}, _cubin_path="", hash="")
        )
        attributes = metadata.launch_cooperative_grid or metadata.launch_pdl
        if attributes or len(self._kernel.arg_tys) > MOST_ARGUMENTS:
            raise NotImplementedError

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: int,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *values: Any,
    ) -> None:
        """Launches the loaded kernel `function`, as a launcher of Triton does."""
        kernel = self._kernel
        kernel.function = function
        arguments = [value for i, value in enumerate(values) if i not in kernel.full_constexprs]
        kernel.run(grid_x, grid_y, grid_z, stream, *arguments)


def _general_launchers(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what makes launchers: general ones, or compiled ones for kernels that need them."""

    def make(source: Any, metadata: Any) -> Any:
        try:
            return GeneralLauncher(source, metadata)
        except (NotImplementedError, KeyError, AttributeError):
            return compiled(source, metadata)

    return make


_run = CachingAutotuner.run


def _run_if_tuned(self: CachingAutotuner, *args: Any, stream: Any, **kwargs: Any) -> Any:
    """Runs a kernel only if that serves to choose one of several launches, and only saves it otherwise.

    A package's kernels run as they are compiled, on made-up numbers. Those of `recsys.ops`, which have one
    launch, would follow made-up indices out of their tensors.
    """
    if not self.launchers:
        self.precompile()
    if len(self.launchers) > 1:
        return _run(self, *args, stream=stream, **kwargs)
    self.save_gpu_kernel(stream, self.launchers[0])
    return None


_generate = Grid2DWithYZOverflow.generate


def _generate_guarded(self: Any, *args: Any, **kwargs: Any) -> None:
    """Makes packages launch nothing for tensors without entries, as with PyTorch 2.13. The code that PyTorch
    2.11 writes for a GPU divides by zero there if a kernel has two dimensions, which ends the process."""
    _generate(self, *args, **kwargs)
    if self.mode == "cpp" and "y_grid_div_ == 0" not in str(self.y_grid):
        self.y_grid = f"(y_grid_div_ == 0 ? 0 : {self.y_grid})"


def without_regex(header: str) -> str | None:
    """Returns the text of `HEADER` with a parser of device names by hand; None if it is not as expected.

    A third of the code that g++ compiles for the smallest package is that of std::regex, 4 s of CPU time.
    """
    for text, replacement in WITHOUT_REGEX:
        if text not in header:
            return None
        header = header.replace(text, replacement)
    return None if "regex" in header else header


def _changed_headers() -> Path | None:
    """Returns a folder with the changed header; None if there is none, and the compiler then takes longer."""
    for folder in cpp_extension.include_paths():
        try:
            text = without_regex((Path(folder) / HEADER).read_text(encoding="utf-8"))
            return None if text is None else _written(text)
        except OSError:
            continue
    return None


def _written(text: str) -> Path:
    """Writes the header to a folder of the compiler's cache, unless it is there."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = Path(cache_dir()) / f"recsys-headers-{name}"
    path = folder / HEADER
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another export may write or read it at the same time.
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            aside.write_text(text, encoding="utf-8")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    return folder


_torch_related = cpp_builder._get_torch_related_args


def _searching(folder: Path) -> Callable[..., tuple[list[str], list[str], list[str]]]:
    """Returns a function that lets the compiler look for PyTorch's headers in the folder first."""

    def arguments(*args: Any, **kwargs: Any) -> tuple[list[str], list[str], list[str]]:
        folders, *rest = _torch_related(*args, **kwargs)
        return [str(folder), *folders], *rest

    return arguments
