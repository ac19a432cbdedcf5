"""A package: the folder that `recsys.export` writes and `recsys.predict` reads.

    package.json        what it is: format, kind, versions, target, inputs with their dims, outputs, limits
    manifest.json       SHA-256 of every other file
    model.pt2           AOTInductor package of the scoring graph: native code, as trustworthy as its sender
    config.resolved     the resolved config it was trained with
    vocabulary/         original ids of every table
    items.safetensors   retrieval: the vector of every item, in the order of its vocabulary file
    golden.safetensors  a few real rows with the evaluated model's answers, compared at every load
    parity.json         how close the package came to the evaluated model on real rows

The compiled graph does not check its inputs: a wrong dtype or a strided tensor would give wrong scores
without a word. `Package.run` checks them.
"""

import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from recsys import config, environment, files
from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.errors import RecsysError
from recsys.models.scoring import TensorSpec, flatten

FORMAT = 2
MODEL, ITEMS, GOLDEN, VOCABULARY = "model.pt2", "items.safetensors", "golden.safetensors", "vocabulary"


class PackageError(RecsysError):
    """A package that is damaged, of another format, or does not compute what it computed when it was made."""


@dataclass
class Description:
    """`package.json`.

    Attributes:
        kind: "ranker" or "retriever".
        step: optimizer steps that the weights were trained for.
        device: "cpu" or "cuda"; `target` is the instruction set or GPU architecture it was compiled for.
        inputs: name, dtype and named dims of every input, in order.
        outputs: names of the output's columns (ranker: the tasks).
        max_batch_size: rows that one call may have.
        tolerance: largest allowed |a - b| / max(1, |b|) of golden rows.
        op_libraries: Python modules that register operators of the graph; imported before it is loaded.
    """

    kind: str
    step: int
    device: str
    target: str
    inputs: list[dict]
    outputs: list[str]
    max_batch_size: int
    tolerance: float
    op_libraries: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=environment.versions)
    format: int = FORMAT


class Package:
    """A loaded package.

    Attributes:
        description: what it is.
        pipeline: the resolved config, its vocabulary files pointing into the package.
        items: retrieval: [V, E] float32 vector of every item, in the order of the vocabulary; else None.

    Raises:
        PackageError: see the class.
    """

    def __init__(self, folder: Path, *, check_golden: bool = True):
        """Loads the graph.

        Args:
            folder: of the package.
            check_golden: compare with the stored answers; the exporter compares more rows itself.
        """
        folder = Path(folder)
        faults = files.manifest_faults(folder)
        if faults:
            raise PackageError("\n".join([*faults, "The package is not whole: export it again."]))
        self.folder = folder
        self.description = _read_description(folder)
        self.pipeline = _read_config(folder)
        self.items = load_file(folder / ITEMS)["items"] if self.description.kind == "retriever" else None
        self._inputs = [TensorSpec.from_json(entry) for entry in self.description.inputs]
        self._runner = load_graph(folder / MODEL, self.description.op_libraries)
        if check_golden:
            self._check_golden()

    def run(self, batch: Batch) -> Tensor:
        """Scores a batch: ranking [N, tasks] predictions, retrieval [B, E] queries; float32 on the host.

        Raises:
            PackageError: more rows than the package accepts.
        """
        rows = len(batch.uih_lengths)
        if rows > self.description.max_batch_size:
            raise PackageError(
                f"{rows} rows in one call; the package was exported for export.max_batch_size = "
                f"{self.description.max_batch_size}: make predict.batch_size smaller"
            )
        return self.run_flat(flatten(batch))

    def run_flat(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """As `run`, from the flat inputs of `models.scoring`, in the order of `description.inputs`."""
        device = torch.device(self.description.device)
        inputs = check_inputs(tuple(tensor.to(device) for tensor in inputs), self._inputs)
        (output,) = self._runner(*inputs)
        return output.detach().float().cpu()

    def _check_golden(self) -> None:
        stored = load_file(self.folder / GOLDEN)
        difference = largest_difference(self.run_flat(golden_inputs(stored)), stored["output"])
        if not difference <= self.description.tolerance:
            raise PackageError(
                f"{self.folder}: the golden rows differ by {difference:.2e} from what they were when the "
                f"package was made, {self.description.tolerance:.0e} is allowed: this machine computes "
                "something else. Export the package on a machine like this one."
            )


def load_graph(path: Path, op_libraries: list[str]):
    """The compiled graph as a callable of flat tensors; imports the libraries that register its operators
    first.
    """
    for name in op_libraries:
        __import__(name)
    # The runtime reads this switch once, before the first call: it then refuses tensors of a wrong type or
    # shape.
    os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
    loader = logging.getLogger("torch.export.pt2_archive._package")
    loader.addFilter(_is_not_target_warning)
    try:
        compiled = torch._inductor.aoti_load_package(str(path))
    finally:
        loader.removeFilter(_is_not_target_warning)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            output = compiled(*inputs)
        return tuple(output) if isinstance(output, list | tuple) else (output,)

    return run


def check_inputs(inputs: tuple[Tensor, ...], specs: list[TensorSpec]) -> tuple[Tensor, ...]:
    """The inputs, contiguous, after checking number, dtypes and that equally named dims are equal.

    Raises:
        PackageError: naming the input.
    """
    if len(inputs) != len(specs):
        raise PackageError(f"{len(inputs)} inputs given, the package has {len(specs)}")
    sizes: dict[str, int] = {}
    for spec, tensor in zip(specs, inputs, strict=True):
        if tensor.dtype != spec.dtype or tensor.dim() != len(spec.dims):
            given = f"{tensor.dtype} with {tensor.dim()} dims"
            raise PackageError(
                f"input {spec.name} is {given}; the package takes {spec.dtype} with {len(spec.dims)}"
            )
        for name, size in zip(spec.dims, tensor.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise PackageError(
                    f"input {spec.name}: dim {name} is {size}, {sizes[name]} in an input before it"
                )
    return tuple(tensor.contiguous() for tensor in inputs)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Largest |a - b| / max(1, |b|); infinite for other shapes, or a NaN or infinity on one side only."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    both = (a == b) | (a.isnan() & b.isnan())
    difference = ((a - b).abs() / b.abs().clamp(min=1)).masked_fill(both, 0.0)
    return difference.nan_to_num(nan=float("inf")).max().item()


def golden_inputs(stored: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Flat inputs from a golden file, whose tensors are named `input_000`, `input_001`, ... and `output`."""
    return tuple(stored[name] for name in sorted(stored) if name.startswith("input_"))


def golden_tensors(inputs: tuple[Tensor, ...], output: Tensor) -> dict[str, Tensor]:
    """The reverse of `golden_inputs`."""
    named = {f"input_{i:03d}": tensor.contiguous().cpu() for i, tensor in enumerate(inputs)}
    return {**named, "output": output.float().contiguous().cpu()}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a `.safetensors` file that all who may read the folder may read; `save_file` hides it."""
    path.write_bytes(save(tensors))


def write_description(folder: Path, description: Description) -> None:
    """Writes `package.json`."""
    (folder / "package.json").write_text(json.dumps(asdict(description), indent=1) + "\n", encoding="utf-8")


def _is_not_target_warning(record: logging.LogRecord) -> bool:
    # A package is compiled for `export.march`, older than most machines on purpose; an instruction set that a
    # machine lacks shows in the golden rows at the latest.
    return "Device information mismatch" not in record.getMessage()


def _read_description(folder: Path) -> Description:
    stored = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    if stored.get("format") != FORMAT:
        raise PackageError(
            f"{folder}: package format {stored.get('format')}, this version reads format {FORMAT}"
        )
    return Description(**stored)


def _read_config(folder: Path) -> pb.Pipeline:
    pipeline = config.load(folder / config.FILE_NAME)
    for feature in pipeline.features:
        if feature.HasField("id") and feature.id.HasField("vocabulary"):
            feature.id.vocabulary.file = str(folder / feature.id.vocabulary.file)
    return pipeline
