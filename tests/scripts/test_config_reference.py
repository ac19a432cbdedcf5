"""scripts/config_reference.py: the page is up to date, and a missing comment is found."""

import pytest

from recsys import protos as pb
from scripts import config_reference

PROTO = """
edition = "2023";
package recsys;

// A message.
message Data {
  // A number.
  int32 batch_size = 5 [default = 7];
  string vocabulary_dir = 4;
  // Which.
  enum Kind {
    KIND_UNSPECIFIED = 0;
    // One | two.
    ONE = 1;
  }
  oneof kinds {
    // The kind.
    Kind kind = 2;
  }
}
message Source {}
"""
OPTIONS = """
edition = "2023";
package recsys;

import "google/protobuf/descriptor.proto";

extend google.protobuf.FieldOptions {
  // Which.
  repeated string labels = 50001;
  bool undirected = 50002;
}
"""


def test_the_page_is_up_to_date(capsys):
    assert config_reference.main(["--check"]) == 0, capsys.readouterr().err


def test_the_page_shows_every_field_and_value():
    text = config_reference.REFERENCE.read_text(encoding="utf-8")
    for name in pb.__all__:
        message = getattr(pb, name)
        if hasattr(message, "DESCRIPTOR") and hasattr(message.DESCRIPTOR, "fields"):
            section = text.split(f"### {name}\n")[1].split("\n###")[0]
            for field in message.DESCRIPTOR.fields:
                assert f"| `{field.name}` |" in section, f"{name}.{field.name}"


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "x.proto").write_text(PROTO, encoding="utf-8")
    return config_reference.read_protos(tmp_path)


def test_names_without_a_comment_are_found(sources):
    assert config_reference.without_comment(sources) == [
        "Data.vocabulary_dir",
        "Data.Kind.KIND_UNSPECIFIED",
        "Source",
    ]


def test_options_of_the_schema_want_a_comment_and_are_no_settings(tmp_path):
    (tmp_path / "options.proto").write_text(OPTIONS, encoding="utf-8")
    sources = config_reference.read_protos(tmp_path)
    assert config_reference.without_comment(sources) == ["undirected"]
    assert "##" not in config_reference.reference(sources)


def test_a_row_shows_type_default_and_choice(sources):
    text = config_reference.reference(sources)
    assert "| `batch_size` | int32 | `7` | A number. |" in text
    assert "| `kind` | [Data.Kind](#datakind) |  | *Choice of kinds.* The kind. |" in text
    assert "### Data.Kind\n\nWhich.\n\n| value | meaning |\n| --- | --- |\n| `ONE` | One \\| two. |" in text


def test_a_stale_page_and_a_missing_comment_fail(sources, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config_reference, "ROOT", tmp_path)
    monkeypatch.setattr(config_reference, "REFERENCE", tmp_path / "REFERENCE.md")
    monkeypatch.setattr(config_reference, "read_protos", lambda folder: sources)
    assert config_reference.main(["--check"]) == 1
    shown = capsys.readouterr().err
    assert "REFERENCE.md is stale; run: python scripts/config_reference.py" in shown
    assert "Data.vocabulary_dir has no comment in front of it" in shown
    monkeypatch.setattr(config_reference, "without_comment", lambda sources: [])
    assert config_reference.main([]) == 0
    assert config_reference.main(["--check"]) == 0


def test_a_proto_that_does_not_parse_is_an_error(tmp_path, capfd):
    (tmp_path / "x.proto").write_text("message {", encoding="utf-8")
    with pytest.raises(ValueError, match="protoc refused a file"):
        config_reference.read_protos(tmp_path)
    assert "x.proto" in capfd.readouterr().err
