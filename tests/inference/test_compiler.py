"""The target that graphs are compiled for, and the messages when the compiler or a disk fails."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import fx, nn
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from torch.fx.experimental import _config as symbolic

from recsys import environment
from recsys import protos as pb
from recsys.errors import InstallationError, RecsysError
from recsys.inference import corrected_inductor
from recsys.inference.compiler import compile_graph, instruction_set
from recsys.inference.graph_passes import shrink
from recsys.inference.program import Program
from recsys.models.signature import TensorSpec
from recsys.ops import AttentionMask, SequenceLayout, offsets_from_lengths
from recsys.ops.hstu_attention.work_list import row_work
from tests.tools.assembled import compile_kernel, needs_compiler


@pytest.mark.parametrize(
    "inductor, wanted", [(SimpleNamespace(march=None), "x86-64-v2"), (SimpleNamespace(), "native")]
)
def test_the_instruction_set_is_the_config_s_where_pytorch_can_be_told(monkeypatch, inductor, wanted):
    monkeypatch.setattr(torch._inductor, "config", SimpleNamespace(cpp=inductor))
    pipeline = pb.Pipeline()
    pipeline.export.march = "x86-64-v2"
    assert instruction_set(pipeline) == wanted


class Double(nn.Module):
    """A graph that compiles fast."""

    def forward(self, *inputs):
        return inputs[0] * 2


DOUBLED = [TensorSpec("x", torch.float32, ("rows",))]


def compile_double(path: Path) -> bool:
    return compile_graph(Double().eval(), DOUBLED, (torch.ones(3),), path, pb.Pipeline())


def test_a_disk_that_is_full_is_an_error_and_not_the_end_of_the_process(monkeypatch):
    """PyTorch's own writer of archives, here without the compiler before it, ends in std::terminate."""

    def write(captured, package_path, inductor_configs):
        archive = torch._C.PyTorchFileWriter(package_path)
        archive.write_record("data", bytes(2**20), 2**20)
        archive.write_end_of_file()

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", write)
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        compile_double(Path("/dev/full"))


@pytest.mark.slow
def test_what_is_written_can_be_loaded(tmp_path, monkeypatch):
    """Packages of tests/integration are written and loaded in the same way. No instruction set is
    tried by a program, whatever the processor has: here all of them."""
    tried = []
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda self, code: tried.append(self))
    for name in ("avx512", "avx512_bf16", "vnni", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: True)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    path = tmp_path / "double.pt2"
    compile_double(path)
    loaded = Program(path, DOUBLED, torch.device("cpu"))
    for rows in (0, 1, 5):
        assert loaded([torch.arange(rows).float()])[0].tolist() == [2 * x for x in range(rows)]
    assert tried == []


class Kernel:
    """A Triton kernel with so many launches, as Inductor holds it."""

    def __init__(self, launches):
        self.launchers, self.before, self.done = [], [object() for _ in range(launches)], []

    def precompile(self):
        self.launchers = self.before

    def save_gpu_kernel(self, stream, launcher):
        assert launcher is self.before[0]
        self.done.append("saved")


def test_a_kernel_with_one_launch_is_not_run_as_it_is_compiled(monkeypatch, tmp_path):
    """It would run on made-up numbers, and follow made-up indices out of its tensors."""
    kernels, ours = [Kernel(1), Kernel(2)], []

    def write(*_, **__):
        ours.append(triton_heuristics.CachingAutotuner.run)
        for kernel in kernels:
            ours[0](kernel, "x", stream=0)

    def run(kernel, *args, stream):
        kernel.done.append("run")

    before = triton_heuristics.CachingAutotuner.run
    monkeypatch.setattr(corrected_inductor, "_run", run)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", write)
    assert compile_double(tmp_path / "double.pt2"), "a CUDA graph can hold it"
    assert [kernel.done for kernel in kernels] == [["saved"], ["run"]]
    assert triton_heuristics.CachingAutotuner.run is before is not ours[0]


@triton.jit
def _scale(x, factor, BLOCK: tl.constexpr, y, unused, n, repeats: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * factor * repeats, mask=i < n)


@needs_compiler
def test_kernels_are_launched_without_a_launcher_compiled_for_each(monkeypatch, tmp_path):
    """The driver gets a kernel's arguments without constants, and two empty ones that Triton adds."""
    launched, compiled = [], []
    native = SimpleNamespace(_launch_kernel=lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(StaticallyLaunchedCudaKernel, "C_impl", native)
    types, constants = {"factor": "fp64", "n": "i32"}, {"BLOCK": 64, "unused": None, "repeats": 2}
    kernel = compile_kernel(_scale, types, constants, tmp_path, other="*fp32")
    make = corrected_inductor._general_launchers(lambda *arguments: compiled.append(arguments))
    launch = make(kernel.src, kernel.metadata)
    launch(5, 6, 7, 11, 22, "packed", None, None, None, "x", 0.5, 64, "y", None, 300, 2)
    values = ("x", 0.5, "y", 300, None, None)
    assert launched == [(22, 5, 6, 7, 4, kernel.metadata.shared, "OdOiOO", values, 11)] and not compiled
    cooperative = kernel.metadata._replace(launch_cooperative_grid=True)
    assert make(kernel.src, cooperative) is None and compiled == [(kernel.src, cooperative)]


class Repetitive(nn.Module):
    """Casts to the dtype that is there, sums twice, a change in between, and a size from a value."""

    def forward(self, x, lengths):
        first, again = (torch.cat([n.new_zeros(1), n.cumsum(0)]) for n in (lengths, lengths))
        total = lengths.sum().item()
        torch._check(total >= 0)
        rows = torch.arange(total).index_select(0, first[:-1].clamp(max=total - 1))
        buffer = x.double().to(torch.float32) * 1
        before = buffer.sum(dim=1)
        buffer.add_(1)
        after = buffer.sum(dim=1)
        return x.to(torch.float32), before, after, again + rows.sum(), x.to(torch.float32).to(torch.float64)


def test_a_smaller_graph_gives_the_same_bits():
    dims = {"rows": torch.export.Dim("rows", min=0), "samples": torch.export.Dim("samples", min=0)}
    inputs = torch.randn(5, 4), torch.tensor([3, 2])
    shapes = {0: dims["rows"]}, {0: dims["samples"]}
    captured = torch.export.export(Repetitive(), inputs, dynamic_shapes=shapes)
    names = captured.graph_signature.user_outputs
    before = Counter(str(node.target) for node in captured.graph.nodes)
    shrink(captured)
    captured.validate()
    after = Counter(str(node.target) for node in captured.graph.nodes)
    assert captured.graph_signature.user_outputs == names
    assert before["aten.cumsum.default"] == 2 and after["aten.cumsum.default"] == 1
    assert before["aten._assert_tensor_metadata.default"] > 0 == after["aten._assert_tensor_metadata.default"]
    assert after["aten.sum.dim_IntList"] == 2
    for given in (inputs, (torch.randn(3, 4), torch.tensor([1, 0, 7]))):
        for actual, expected in zip(captured.module()(*given), Repetitive()(*given), strict=True):
            assert torch.equal(actual, expected) and actual.dtype == expected.dtype


class Rejoined(nn.Module):
    """Drops out nothing, slices everything, and joins what it has just split; a copy is changed."""

    def forward(self, x):
        x = nn.functional.dropout(x, 0.5, training=False) + 0
        sizes = [2, x.shape[0] - 2]
        same, changed, swapped = (torch.cat(x.split(sizes)[::step]) for step in (1, 1, -1))
        changed.view(-1).add_(1)
        return x * 2, same[:] * 2, changed * 2, swapped * 2


def test_what_is_split_and_joined_stays_itself_unless_the_copy_is_changed():
    rows = torch.export.Dim("rows", min=4)
    captured = torch.export.export(Rejoined(), (torch.randn(5, 4),), dynamic_shapes=({0: rows},))
    shrink(captured)
    targets = Counter(str(node.target) for node in captured.graph.nodes)
    assert targets["aten.dropout.default"] == targets["aten.slice.Tensor"] == 0
    given = torch.randn(7, 4)
    swapped = torch.cat([given[2:], given[:2]])
    wanted = (given * 2, given * 2, (given + 1) * 2, swapped * 2)
    for actual, expected in zip(captured.module()(given), wanted, strict=True):
        assert torch.equal(actual, expected)


class Kept(nn.Module):
    """Joins what it has split and leaves the copy as it is."""

    def forward(self, x):
        x = x + 1
        return torch.cat(x.split([2, x.shape[0] - 2])) * 2


def test_what_is_split_and_joined_costs_nothing():
    rows = torch.export.Dim("rows", min=4)
    captured = torch.export.export(Kept(), (torch.randn(5, 4),), dynamic_shapes=({0: rows},))
    shrink(captured)
    targets = {str(node.target) for node in captured.graph.nodes}
    assert "aten.cat.default" not in targets and "aten.split_with_sizes.default" not in targets
    given = torch.randn(7, 4)
    assert torch.equal(captured.module()(given), (given + 1) * 2)


class Layers(nn.Module):
    """Layers that each make a list of work, in a part of the graph under autocast, as in models in BF16."""

    def forward(self, tokens, lengths):
        sizes = (tokens.shape[0],) * 3
        layout = SequenceLayout.trusted(lengths, offsets_from_lengths(lengths), lengths, 1, *sizes)
        with torch.autocast("cpu", torch.bfloat16):
            return [row_work(AttentionMask(), layout, 192, 64, section=100, strip=64) + n for n in range(2)]


def test_layers_share_a_list_of_work():
    dims = {0: torch.export.Dim("tokens", min=0)}, {0: torch.export.Dim("rows", min=0)}
    with symbolic.patch(backed_size_oblivious=True):
        captured = torch.export.export(Layers(), (torch.empty(9), torch.tensor([4, 5])), dynamic_shapes=dims)
    shrink(captured)
    graphs = [part.graph for part in captured.graph_module.modules() if isinstance(part, fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.nodes]
    assert len(graphs) == 2
    assert targets.count(torch.ops.aten.argsort.stable) == 2, "one of the samples and one of the tiles"


@pytest.mark.parametrize("entries", [0, 1, 64, 65, 64 * 65_535 + 1, 64 * 200_000])
def test_code_for_a_gpu_computes_a_grid_for_any_number_of_entries(entries, monkeypatch, tmp_path):
    """A kernel of two dimensions is launched with enough programs, none if there is nothing to do. The code
    is compiled and run: it would divide by zero with PyTorch 2.11 as it is."""
    written = []

    def write(*_, **__):
        meta = {"grid_type": "Grid2DWithYZOverflow"}
        written.append(triton_heuristics.GridExpr.from_meta(meta, {"XBLOCK": 32, "YBLOCK": 64}, mode="cpp"))

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", write)
    compile_double(tmp_path / "double.pt2")
    (grid,) = written
    lines = [f"int64_t xnumel = 70, ynumel = {entries};", *grid.prefix]
    lines += [f"uint32_t grid_{axis} = {getattr(grid, f'{axis}_grid')};" for axis in "xyz"]
    body = " ".join([*lines, 'printf("%u %u %u", grid_x, grid_y, grid_z);'])
    source, program = tmp_path / "grid.cpp", tmp_path / "grid"
    source.write_text(f"#include <cstdint>\n#include <cstdio>\nint main() {{ {body} }}\n")
    subprocess.run([environment.find_cxx(), source, "-o", program], check=True)
    x, y, z = map(int, subprocess.run([program], check=True, capture_output=True).stdout.split())
    assert x == 3 and y <= 65_535
    assert y * z == 0 if entries == 0 else 0 <= y * z - -(-entries // 64) < z


def test_indices_are_checked_in_code_for_a_cpu_only(monkeypatch, tmp_path):
    """On a GPU, kernels run while they are compiled, on numbers that mean nothing."""
    settings = []
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda *_, inductor_configs, **__: settings.append(
            inductor_configs["assert_indirect_indexing"]
        )
    )  # fmt: skip
    compile_double(tmp_path / "double.pt2")
    on_gpu = (torch.ones(3, device="meta"),)
    compile_graph(Double().eval(), DOUBLED, on_gpu, tmp_path / "on_gpu.pt2", pb.Pipeline())
    assert settings == [True, False]


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (
            "x.h: fatal error: no such header",
            InstallationError,
            r"the C\+\+ compiler .* failed: x.h: fatal error",
        ),
        ("cannot write: No space left on device", RecsysError, r"no space left for .* in .* bytes free"),
    ],
)
def test_a_compiler_that_fails_is_told_in_a_line(tmp_path, monkeypatch, said, kind, message):
    command = tmp_path / "g++"
    script = f"#!{sys.executable}\nimport subprocess, sys\n"
    script += "if '--version' in sys.argv: sys.exit(subprocess.call(['/usr/bin/g++', '--version']))\n"
    command.write_text(script + f"print({said!r}, file=sys.stderr)\nsys.exit(1)\n")
    command.chmod(0o755)
    monkeypatch.setenv("CXX", str(command))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    # PyTorch has read CXX before.
    chosen = torch._inductor.config.patch("cpp.cxx", (None, str(command)))
    with chosen, pytest.raises(kind, match=message):
        compile_double(tmp_path / "double.pt2")


PARSER = """
#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#define AOTI_RUNTIME_CHECK(condition, text) if (!(condition)) throw std::runtime_error(text)
int aoti_torch_device_type_cpu() { return 0; }
int aoti_torch_device_type_cuda() { return 1; }
using std::stoi;
%s
int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    try {
      int32_t type, number;
      parse_device_str(names[i], type, number);
      std::printf("%%d %%d\\n", type, number);
    } catch (const std::runtime_error&) {
      std::puts("invalid");
    }
  }
}
"""


def test_names_of_devices_are_read_as_by_pytorch_s_regular_expression(tmp_path):
    (folder, *_), _, _ = corrected_inductor._searching(corrected_inductor._changed_headers())(True, True)
    header = (Path(folder) / corrected_inductor.HEADER).read_text()
    parser = (
        "inline void parse_device_str("
        + header.split("inline void parse_device_str(")[1].split("\n}\n")[0]
        + "\n}\n"
    )
    (tmp_path / "parser.cpp").write_text(PARSER % parser)
    program = tmp_path / "parser"
    subprocess.run([environment.find_cxx(), tmp_path / "parser.cpp", "-std=c++17", "-o", program], check=True)
    names = [
        "cpu",
        "cuda",
        "cuda:0",
        "cuda:17",
        "cpu:2",
        "",
        ":",
        ":1",
        "cuda:",
        "cuda:x",
        "cuda:1:2",
        "tpu",
        "tpu:1",
        "cuda1",
    ]
    expected = []
    for name in names:
        match = re.fullmatch("(cpu|cuda)(:([0-9]+))?", name)
        expected.append(f"{('cpu', 'cuda').index(match[1])} {match[3] or -1}" if match else "invalid")
    said = subprocess.run([program, *names], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == expected


def test_a_header_of_another_pytorch_stays_as_it_is(monkeypatch, tmp_path):
    assert corrected_inductor.without_regex("#include <regex>\n") is None
    monkeypatch.setattr(corrected_inductor.cpp_extension, "include_paths", lambda: [str(tmp_path)])
    assert corrected_inductor._changed_headers() is None
