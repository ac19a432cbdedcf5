"""The layers of the package: an import that points upward fails here, also one inside a function."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recsys import protos as pb

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "recsys"

# Each layer may import itself and what stands before it.
LAYERS = (
    {"errors", "environment", "files", "logs", "protos", "callable_module", "typed_json"},
    {"config"},
    {"ops"},
    {"modules", "data"},
    {"models"},
    {"scoring"},
    {"evaluation"},
    {"training", "inference"},
    {"serving"},
    {"flags", "prepare"},
    {"sid"},
    {"api"},
    {"cli", "doctor_checks", "train", "evaluate", "export", "predict", "serve", "doctor"}
    | {"baseline", "blend", "sweep", "__main__", "compile_protos", "init", "install", "resources"}
    | {"package_flags", "serve_flags"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ENTRY_POINTS = ("train", "evaluate", "export", "predict", "serve", "doctor")
# Of two neighbours one must not know the other; one layer stays usable without the config language.
FORBIDDEN = {"data": {"modules"}, "ops": {"protos", "config"}}
# Where one layer may use a single name of another.
ALLOWED_NAMES = {
    ("data", "ops"): {"ops.SequenceLayout", "ops.jagged.layout"},
    ("modules", "data"): {"data.batch"},
    ("models", "data"): {"data.batch", "data.codes"},
    ("scoring", "data"): {"data.batch"},
}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "protos" not in p.relative_to(PACKAGE).parts)


def layer_of(path: Path) -> str | None:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return None if first == "__init__" else first


@functools.cache
def imports_of(source: str, package: str) -> set[str]:
    """Every `recsys` name that a module imports, anywhere in it, as a dotted path below `recsys`."""
    results = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            results |= {f"{module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("recsys.") for name in results if name.startswith("recsys.")}


def violations(layer: str, imported: set[str]) -> list[str]:
    faults = []
    for name in sorted(imported):
        target = name.split(".")[0]
        if target == "__version__":
            continue
        if target not in LEVEL:
            faults.append(f"{name}: recsys.{target} is in no layer; add it to LAYERS")
        elif LEVEL[target] > LEVEL[layer] or target in FORBIDDEN.get(layer, ()):
            faults.append(f"{name}: {layer} may not import {target}")
        elif (layer, target) in ALLOWED_NAMES:
            allowed = ALLOWED_NAMES[layer, target]
            if not any(name == known or name.startswith(f"{known}.") for known in allowed):
                faults.append(f"{name}: {layer} may import only {', '.join(sorted(allowed))} of {target}")
    return faults


def imports(path: Path) -> set[str]:
    return imports_of(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parent.parts))


def test_imports_point_downward():
    faults = {}
    for path in modules():
        layer, imported = layer_of(path), imports(path)
        if layer is None:
            names = {name.split(".")[0] for name in imported}
            assert names <= {"api"}, "recsys/__init__.py names functions of recsys.api for type checkers only"
        else:
            assert layer in LEVEL, f"recsys.{layer} is in no layer; add it to LAYERS"
            faults[str(path.relative_to(PACKAGE))] = violations(layer, imported)
    assert {path: wrong for path, wrong in faults.items() if wrong} == {}
    assert len(faults) > 400


@pytest.mark.parametrize(
    ("layer", "package", "source", "fault"),
    [
        ("ops", "recsys.ops", "from recsys.modules import stu", "ops may not import modules"),
        ("ops", "recsys.ops", "def f():\n    from ..models.ranker import Ranker", "may not import models"),
        ("ops", "recsys.ops", "import recsys.protos as pb", "ops may not import protos"),
        ("data", "recsys.data.sources", "from recsys.ops import AttentionMask", "may import only"),
        ("models", "recsys.models", "from recsys.data import loader", "may import only data.batch"),
        ("modules", "recsys.modules", "from recsys import training", "modules may not import training"),
        ("modules", "recsys.modules", "from recsys.data.loader import Loader", "may import only data.batch"),
        ("data", "recsys.data", "from recsys.modules import embedding", "data may not import modules"),
        ("training", "recsys.training", "from recsys import surprise", "is in no layer"),
    ],
)
def test_the_rule_finds_what_it_is_for(layer, package, source, fault):
    (finding,) = violations(layer, imports_of(source, package))
    assert fault in finding


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Every module of `recsys` with the modules that it imports anywhere in it, by their dotted names."""
    paths = {module_name(path): path for path in modules()}
    graph = {}
    for name, path in paths.items():
        imported = {f"recsys.{target}" for target in imports(path)}
        # `from recsys.x import y` imports the module `recsys.x.y` if there is one, else a name of `recsys.x`.
        targets = {target if target in paths else target.rpartition(".")[0] for target in imported}
        if name == "recsys":
            # It names the functions of the library for type checkers, and imports nothing by itself.
            targets = set()
        graph[name] = (targets & set(paths)) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other: strongly connected components, by Tarjan's algorithm."""
    index, low, stack, results = {}, {}, [], []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            first = stack.index(node)
            if len(stack) - first > 1:
                results.append(sorted(stack[first:]))
            del stack[first:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return results


def test_no_modules_import_each_other_in_a_circle():
    assert circles(import_graph()) == []


# Words for a family or a mixer, as a part of an identifier or in a string; `hstu_attention` is an op.
NAMES = re.compile(
    r"ranker|retriever|sasrec|mixture|hybrid|linear_?mixer|mixer\.linear|hstu(?!_?attention)"
    r"|code_?generator|model\.generator",
    re.IGNORECASE,
)
NAMING_LAYERS = {"models", "modules", "protos", "ops"}
NAMING_FILES = {
    "prepare/starter_config.py": "it writes the text of a config that a user starts from",
}


def names_of_models(source: str) -> set[str]:
    """Identifiers and strings of a module that name a family or a mixer; docstrings and comments may."""
    nodes = list(ast.walk(ast.parse(source)))
    alone = [node.value for node in nodes if isinstance(node, ast.Expr)]
    prose = {id(node) for node in alone if isinstance(node, ast.Constant)}
    results = set()
    for node in nodes:
        for field in ("id", "attr", "name", "arg", "asname", "module", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str) and id(node) not in prose and NAMES.search(word):
                results.add(word)
    return results


def test_only_models_and_modules_name_a_family_or_a_mixer():
    named = {}
    for path in modules():
        if layer_of(path) not in NAMING_LAYERS:
            named[str(path.relative_to(PACKAGE))] = names_of_models(path.read_text(encoding="utf-8"))
    assert {place: words for place, words in named.items() if words and place not in NAMING_FILES} == {}
    assert all(named.get(place, True) for place in NAMING_FILES), "a file in NAMING_FILES names nothing"


def test_every_family_and_mixer_has_a_name_that_is_looked_for():
    for choice in (pb.Model, pb.Mixer):
        (oneof,) = choice.DESCRIPTOR.oneofs
        for field in oneof.fields:
            assert NAMES.search(f"{choice.DESCRIPTOR.name}.{field.name}")
            assert NAMES.search(field.message_type.name)


@pytest.mark.parametrize(
    "source",
    [
        "from recsys.models.ranker import build",
        'if pipeline.model.HasField("retriever"): pass',
        "isinstance(mixer, pb.HstuMixer)",
        "config.mixer.sasrec",
        'raise ValueError(f"{name} keeps no cache; choose hstu or mixture")',
        "def f(ranker): pass",
    ],
)
def test_a_name_of_a_model_is_found(source):
    assert names_of_models(source)


def test_prose_and_the_op_are_no_names_of_models():
    assert not names_of_models('"""What a ranker reads."""\nx = 1\n"""Of a retriever."""\nhstu_attention(x)')


SHARED_BY_OPS = {"runtime", "jagged"}
"""Packages of `recsys.ops` whose modules all ops may import."""


def foreign_insides(graph: dict[str, set[str]]) -> list[str]:
    """Imports by which one op reaches into another one's package, or the runtime into an op."""
    faults = []
    for name, targets in graph.items():
        importer = name.split(".")
        for target in targets:
            imported = target.split(".")
            if importer[:2] != ["recsys", "ops"] or imported[:2] != ["recsys", "ops"] or len(importer) < 3:
                continue
            if importer[2] == "runtime" and imported[2:3] != ["runtime"]:
                faults.append(f"{name}: the runtime may not import {target}")
            elif len(imported) > 3 and imported[2] not in {importer[2], *SHARED_BY_OPS}:
                faults.append(f"{name}: {importer[2]} may not import {target}")
    return sorted(faults)


def test_no_op_imports_the_inside_of_another():
    assert foreign_insides(import_graph()) == []


@pytest.mark.parametrize(
    ("importer", "imported", "fault"),
    [
        ("top_k.hopper", "linear_logp.launch", "top_k may not import recsys.ops.linear_logp.launch"),
        ("runtime.launch", "jagged.layout", "the runtime may not import recsys.ops.jagged.layout"),
        ("top_k.hopper", "top_k.launch", None),
        ("top_k.hopper", "runtime.launch", None),
        ("top_k.hopper", "jagged.layout", None),
        ("top_k.hopper", "linear_logp", None),
    ],
)
def test_the_rule_of_ops_finds_what_it_is_for(importer, imported, fault):
    actual = foreign_insides({f"recsys.ops.{importer}": {f"recsys.ops.{imported}"}})
    assert actual == ([] if fault is None else [f"recsys.ops.{importer}: {fault}"])


def is_number(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float)


def unsafe_defaults(source: str) -> list[str]:
    """Parameters of Triton functions whose default is not a number or a truth value.

    Inductor writes kernels into files of their own, with the globals that their bodies read but without those
    that defaults name; and Triton 3.6 does not take a text that is the default of a nested call.
    """
    names = []
    if "jit" not in source:  # to parse each module takes seconds
        return names
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            defaults = node.args.defaults
            parameters = node.args.args[len(node.args.args) - len(defaults) :]
            pairs = zip(parameters, defaults, strict=True)
            names += [parameter.arg for parameter, value in pairs if not is_number(value)]
    return names


def test_defaults_of_kernels_are_numbers():
    assert {str(path): names for path in modules() if (names := unsafe_defaults(path.read_text()))} == {}


def test_a_default_that_is_a_name_or_a_text_is_found():
    source = (
        "@triton.jit\ndef f(x, N: tl.constexpr = 2, M: tl.constexpr = ANY, P='a'): ...\ndef g(x=ANY): ..."
    )
    assert unsafe_defaults(source) == ["M", "P"]


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_the_rule_lets_downward_imports_pass():
    source = "from recsys.data.batch import Batch\nfrom recsys.ops import hstu_attention\nfrom . import base"
    assert violations("models", imports_of(source, "recsys.models")) == []
    assert violations("data", imports_of("from recsys.ops import SequenceLayout", "recsys.data")) == []


# Each stage of `data` may import itself and those before it.
DATA_STAGES = (
    {"arrow", "counts", "filesystems", "hashing", "lru", "transfer"},
    {"schema"},
    {"codes", "features", "pretrained_rows"},
    {"sources"},
    {"plan"},
    {"convert"},
    {"workers"},
    {"batch", "collator", "negatives", "unknown_ids"},
    {"inspect", "loader", "validation"},
)
DATA_LEVEL = {name: level for level, names in enumerate(DATA_STAGES) for name in names}


def stage_violations(stage: str, imported: set[str]) -> list[str]:
    stages = {name.split(".")[1] for name in imported if name.startswith("data.")}
    return sorted(name for name in stages if DATA_LEVEL[name] > DATA_LEVEL[stage])


def test_stages_of_data_import_in_one_direction():
    faults = {}
    for path in (PACKAGE / "data").rglob("*.py"):
        stage = path.relative_to(PACKAGE / "data").parts[0].removesuffix(".py")
        if stage == "__init__":
            assert not imports(path)
        else:
            faults[str(path.relative_to(PACKAGE))] = stage_violations(stage, imports(path))
    assert {path: wrong for path, wrong in faults.items() if wrong} == {}
    assert len(faults) > 40


def test_a_stage_that_imports_a_later_one_is_found():
    imported = imports_of(
        "from recsys.data.workers import pool\nfrom ..schema import contract", "recsys.data.plan"
    )
    assert stage_violations("plan", imported) == ["workers"]


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_points_stay_short(name):
    path = PACKAGE / f"{name}.py"
    if not path.exists():
        pytest.skip(f"{path.name} is not there yet")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 80


def test_importing_the_package_loads_nothing_else():
    code = "import sys; before = set(sys.modules); import recsys; print(sorted(set(sys.modules) - before))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(ast.literal_eval(shown.stdout))
    assert {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names} == {"recsys"}
