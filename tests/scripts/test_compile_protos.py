"""scripts/compile_protos.py on throw-away protos: imports between files, re-exports, stale files, errors."""

import subprocess
import sys

import pytest

from recsys import environment
from scripts.compile_protos import compile_protos

FEATURE = """edition = "2023"; package recsys;
enum Side { SIDE_UNSPECIFIED = 0; USER = 1; }
message Feature { int32 dim = 1 [default = 3]; }
"""
PIPELINE = """edition = "2023"; package recsys;
import "recsys/protos/feature.proto";
message Pipeline { repeated Feature features = 1; }
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "feature.proto").write_text(FEATURE)
    (tmp_path / "protos" / "pipeline.proto").write_text(PIPELINE)
    (tmp_path / "recsys").mkdir()
    (tmp_path / "recsys" / "__init__.py").touch()
    return tmp_path


def evaluate(root, code):
    """Run code where `recsys` is the throw-away package, in a process as protobuf's registry is global."""
    done = subprocess.run(
        [sys.executable, "-c", f"from recsys import protos as pb; {code}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_messages_of_every_file_are_in_the_package(root):
    compile_protos(root)
    assert evaluate(root, "print(pb.Pipeline(features=[pb.Feature()]).features[0].dim, pb.USER)") == "3 1"
    assert evaluate(root, "print(*pb.__all__)") == "Feature Side SIDE_UNSPECIFIED USER Pipeline"
    assert evaluate(root, "print(pb.Feature().HasField('dim'))") == "False"
    assert (root / "recsys" / "protos" / "pipeline_pb2.pyi").exists()
    assert (root / "recsys" / "protos" / "pipeline.proto").read_text() == PIPELINE


def test_options_of_fields_are_in_the_package(root):
    (root / "protos" / "options.proto").write_text(
        'edition = "2023"; package recsys; import "google/protobuf/descriptor.proto";\n'
        "extend google.protobuf.FieldOptions { string unit = 50001; }\n"
    )
    feature = FEATURE.replace("[default = 3]", '[default = 3, (unit) = "rows"]')
    feature = feature.replace("enum Side", 'import "recsys/protos/options.proto";\nenum Side')
    (root / "protos" / "feature.proto").write_text(feature)
    compile_protos(root)
    asked = "print(pb.Feature.DESCRIPTOR.fields_by_name['dim'].GetOptions().Extensions[pb.unit])"
    assert evaluate(root, asked) == "rows"


def test_only_what_changed_is_written(root):
    assert len(compile_protos(root)) == 7
    assert compile_protos(root) == []
    (root / "protos" / "feature.proto").write_text(FEATURE.replace("default = 3", "default = 4"))
    assert [path.name for path in compile_protos(root)] == ["__init__.py", "feature.proto", "feature_pb2.py"]
    assert evaluate(root, "print(pb.Feature().dim)") == "4"


def test_the_package_knows_what_it_was_made_from(root):
    compile_protos(root)
    made = environment.protos_fingerprint(sorted((root / "protos").glob("*.proto")))
    assert evaluate(root, "print(pb.SOURCES)") == made


def test_modules_of_a_deleted_proto_go_away(root):
    compile_protos(root)
    (root / "protos" / "pipeline.proto").unlink()
    compile_protos(root)
    assert sorted(p.name for p in (root / "recsys" / "protos").iterdir() if p.is_file()) == [
        "__init__.py",
        "feature.proto",
        "feature_pb2.py",
        "feature_pb2.pyi",
    ]


def test_a_faulty_proto_stops_the_build_and_leaves_the_package_alone(root, capfd):
    compile_protos(root)
    (root / "protos" / "pipeline.proto").write_text(PIPELINE.replace("Feature features", "Featur features"))
    with pytest.raises(SystemExit, match="protoc failed"):
        compile_protos(root)
    assert f"{root}/protos/pipeline.proto:3:29" in capfd.readouterr().err
    assert evaluate(root, "print(pb.Pipeline.DESCRIPTOR.fields[0].name)") == "features"


def test_a_checkout_without_protos_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no .proto files"):
        compile_protos(tmp_path)
