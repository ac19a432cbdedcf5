"""Compiles a graph to native code: `torch.export` captures it, and AOTInductor compiles it.

Failures here are due to the machine: no compiler is installed, or a disk is full.
"""

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, fx, nn
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx.experimental import _config as symbolic

from recsys import environment
from recsys import protos as pb
from recsys.errors import InstallationError, RecsysError
from recsys.inference.corrected_inductor import corrected_inductor
from recsys.inference.graph_passes import shrink
from recsys.models.signature import TensorSpec
from recsys.ops.runtime.embedding import embedding

NATIVE = "native"
"""The value of -march that stands for the machine that compiles."""

NO_SPACE = "No space left on device"


def require_compiler() -> None:
    """Raises InstallationError, with the command that installs one, if there is no C++ compiler."""
    if environment.find_cxx() is None:
        raise InstallationError(
            "no C++ compiler was found, and a package is compiled code: install one (Debian, Ubuntu: "
            "`apt-get install g++`; Fedora: `dnf install gcc-c++`) or name one in the variable CXX"
        )


def compile_graph(
    graph: nn.Module,
    specs: list[TensorSpec],
    example: tuple[Tensor, ...],
    path: Path,
    pipeline: pb.Pipeline,
    weights: dict[str, Tensor] | None = None,
) -> bool:
    """Captures a graph with every named dim dynamic and compiles it to an AOTInductor package.

    Args:
        graph: the graph, in eval mode.
        specs: specs of the graph's inputs.
        example: inputs of which only the sizes matter: 2 or more and all different, as of `example_inputs`.
        path: path of the `.pt2` file.
        pipeline: the config, read for `export.march`.
        weights: None to store weights in the file. Otherwise the file has no weights, and they are added to
            this mapping under the names that `Program` looks up.

    Returns:
        Whether a CUDA graph could hold the graph: it reads no sizes from the device, as truncation does.

    Raises:
        InstallationError: the compiler fails.
        RecsysError: no space is left for the compiler's files.
        OSError: `path` cannot be written.
    """
    dims = {name: torch.export.Dim(name, min=0) for spec in specs for name in spec.dims if not name.isdigit()}
    shapes = tuple(
        {axis: dims[name] for axis, name in enumerate(spec.dims) if name in dims} for spec in specs
    )
    with embedding() as embedded:
        # Do not specialize the graph on sizes 0 and 1, so that one artifact serves all sizes.
        oblivious = symbolic.patch(backed_size_oblivious=True)
        with environment.quiet_export(), _uncached(), oblivious, torch.no_grad():
            captured = torch.export.export(graph, example, dynamic_shapes=(shapes,), strict=False)
            shrink(captured)
        settings = _settings(pipeline, example[0].device)
        if embedded.launched:
            settings["compile_threads"] = 1
        if weights is not None:
            settings["aot_inductor.package_constants_in_so"] = False
            weights |= {name: _on_host(weight) for name, weight in captured.state_dict.items()}
            # Constants that are not part of the model are different in each graph.
            constants = {
                name: value for name, value in captured.constants.items() if isinstance(value, Tensor)
            }
            weights |= {f"{path.stem}/{name}": _on_host(value) for name, value in constants.items()}
        try:
            with _archive(path) as file, environment.quiet_export(), _uncached(), corrected_inductor():
                torch._inductor.aoti_compile_and_package(
                    captured, package_path=file, inductor_configs=settings
                )
        except InductorError as error:
            raise _explain(error) from error
    return not any(
        node.target is torch.ops.aten.item.default
        for part in captured.graph_module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )


def _uncached() -> AbstractContextManager[None]:
    """Makes PyTorch compute the shapes of every result anew: with symbolic sizes that takes less time than to
    look them up and to check what was found."""
    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)


def _settings(pipeline: pb.Pipeline, device: torch.device) -> dict[str, object]:
    """Returns the settings of Inductor."""
    settings: dict[str, object] = {
        "aot_inductor.check_lowerbound": False,
        # This affects only the glue code between kernels, not kernels. It halves the time of compilation.
        "aot_inductor.compile_wrapper_opt_level": "O0",
        # On a GPU, padding of matrices to faster sizes would bound inputs by the sizes of the example.
        "shape_padding": False,
        # On a GPU, Inductor runs kernels of several launches as it compiles, on made-up numbers. An index of
        # theirs would fail the check, and end the use of the GPU. The graphs clamp such indices.
        "assert_indirect_indexing": device.type == "cpu",
        "cpp.simdlen": 256,
        "cpp.vec_isa_ok": True,
    }
    if hasattr(torch._inductor.config.aot_inductor, "enable_line_tables"):
        # Nobody looks for lines of generated code.
        settings["aot_inductor.enable_line_tables"] = False
    if instruction_set(pipeline) != NATIVE:
        settings["cpp.march"] = instruction_set(pipeline)
    return settings


def instruction_set(pipeline: pb.Pipeline) -> str:
    """Returns the -march of the host code: `export.march`, so that a package also runs on other machines.

    PyTorch 2.11 can compile only for the machine that it runs on.
    """
    return pipeline.export.march if hasattr(torch._inductor.config.cpp, "march") else NATIVE


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


class _Held(io.RawIOBase):
    """A file that stores its first error, and afterwards accepts data but writes nothing.

    PyTorch's archive writer also writes in its destructor, where an error would end the process.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        # PyTorch seeks to the beginning for callers that read the archive from memory.
        return self._file.seek(offset, whence)


@contextmanager
def _archive(path: Path) -> Iterator[_Held]:
    """Opens a new file to which PyTorch can write an archive.

    Raises:
        OSError: the file could not be written; raised at the end of the block.
    """
    # Do not buffer, so that closing has nothing left to write.
    with path.open("wb", buffering=0) as file:
        output = _Held(file)
        yield output
    if output.error is not None:
        raise OSError(output.error.errno, output.error.strerror, str(path))


def _explain(error: InductorError) -> Exception:
    """Returns an error with advice if a user can fix the cause, else the given error."""
    cause = error.inner_exception
    if NO_SPACE in str(cause):
        places = dict.fromkeys((tempfile.gettempdir(), cache_dir()))
        rooms = " and ".join(f"{place} ({shutil.disk_usage(place).free:,} bytes free)" for place in places)
        problem = f"no space left for what the compiler writes, in {rooms}"
        return RecsysError(
            f"{problem}: make room, or name other folders in TMPDIR and TORCHINDUCTOR_CACHE_DIR"
        )
    if isinstance(cause, CppCompileError | InvalidCxxCompiler):
        said = getattr(cause, "output", str(cause)).strip().splitlines() or ["it said nothing"]
        problem = next((line for line in said if "error" in line.lower()), said[-1])
        return InstallationError(
            f"the C++ compiler {environment.find_cxx()} failed: {problem.strip()}. `python -m recsys.doctor` "
            "tries it with a tiny package; name another one in the variable CXX"
        )
    return error
