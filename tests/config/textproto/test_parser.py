"""Texts mean what they mean to protobuf's own parser; a mistake is named with its place."""

import random
import re

import pytest
from google.protobuf import text_format

from recsys import config
from recsys import protos as pb
from recsys.errors import ConfigError
from tests.config_texts import RANKER, RETRIEVER, findings


@pytest.mark.parametrize("text", [RANKER, RETRIEVER])
def test_a_text_means_what_protobuf_says(write, text):
    assert config.load(write(text)) == text_format.Parse(text, pb.Pipeline())


def test_locations_name_the_line_of_each_field(write):
    loaded = config.read(write(RANKER))
    lines = RANKER.split("\n")
    for path, needle in [
        ("data.batch_size", "batch_size: 16"),
        ("features[1]", '"author"'),
        ("features[1].sides[1]", '"author"'),
        ("model.ranker.tasks[1].metrics[0].mae", "mae"),
        ("train.schedule.cosine", "cosine"),
    ]:
        number = int(loaded.locations[path].removeprefix("x.config:"))
        assert needle in lines[number - 1]


# Every kind of mistake, with what must be said about it; `@` stands for the line's number.
MISTAKES = [
    (
        "model { embedding_dims: 3 }",
        "x.config:@: model.embedding_dims: no such field. Did you mean embedding_dim?",
    ),
    (
        "train { qqq { a { b: 1 } } }",
        "x.config:@: train.qqq: no such field. Allowed here: num_epochs, num_steps",
    ),
    (
        f"train {{ {'q' * 300}: 1 }}",
        "x.config:@: train.qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq... (306 characters): no such field.",
    ),
    ("data { batch_size: 2.5 }", "x.config:@: data.batch_size: expected a whole number (int32), found 2.5"),
    ("data { batch_size: 3000000000 }", "x.config:@: data.batch_size: 3000000000 does not fit int32"),
    ("data { batch_size: x }", "x.config:@: data.batch_size: expected a whole number (int32), found x"),
    ("data { batch_size: 010 }", "x.config:@: data.batch_size: expected a whole number (int32), found 010"),
    ("data { batch_size 3 }", "x.config:@: data.batch_size: expected ':' and a whole number"),
    ("data { batch_size: 3 batch_size: 4 }", "x.config:@: data.batch_size: set twice, first in line @"),
    (
        "data { train { csv {} parquet {} } }",
        "x.config:@: data.train.parquet: only one of these may be set, but line @ sets csv",
    ),
    ("data: 3", "x.config:@: data: expected Data in braces, found '3'"),
    (
        "data { vocabulary_dir: here }",
        "x.config:@: data.vocabulary_dir: expected a string in quotes, found here",
    ),
    ("data { vocabulary_dir: 'a\\q' }", "x.config:@: data.vocabulary_dir: unknown escape \\q"),
    (
        "data { key_columns: ['a', 3, 'b'] }",
        "x.config:@: data.key_columns[1]: expected a string in quotes, found 3",
    ),
    ("data { key_columns: ['a' 'b',] }", "x.config:@:29: a comma after the last value of a list"),
    (
        "data { train { synthetic { num_rows: [1] } } }",
        "data.train.synthetic.num_rows: expected a whole number (int64)",
    ),
    ("features { sides: USED }", "x.config:@: features[0].sides[0]: no value USED. Did you mean USER?"),
    (
        "features { sides: 1 }",
        "x.config:@: features[0].sides[0]: expected one of USER, HISTORY, CANDIDATE, ITEM, found 1",
    ),
    ("features { sides: SIDE_UNSPECIFIED }", "features[0].sides[0]: no value SIDE_UNSPECIFIED."),
    (
        "features { id { multi_valued: yes } }",
        "features[0].id.multi_valued: expected true or false, found yes",
    ),
    (
        "train { max_grad_norm: nan }",
        "x.config:@: train.max_grad_norm: nan is not allowed; give a finite number",
    ),
    ("train { max_grad_norm: -inf }", "x.config:@: train.max_grad_norm: -inf is not allowed"),
    ("train { max_grad_norm: 1e999 }", "x.config:@: train.max_grad_norm: 1e999 is too large for a number"),
    ("train { num_steps: %s }" % ("9" * 9000), "does not fit int64"),
    ("predict { top_k: }", "x.config:@: predict.top_k: expected a whole number (int32), found '}'"),
    ("predict { top_k: - }", "x.config:@: predict.top_k: expected a whole number (int32), found -"),
    ("predict { % top_k: 3 }", "x.config:@:11: unexpected '%'"),
    ("predict { 3: top_k }", "x.config:@:11: expected the name of a field, found '3'"),
    ("export { march: 'x }", "x.config:@:17: a string that does not end on its line"),
    ("export { [ab]: 1 }", "x.config:@:10: expected the name of a field, found '['"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[text[:30] for text, _ in MISTAKES])
def test_a_mistake_is_named_with_its_line_and_path(write, text, message):
    findings_of_config = findings(
        config.load, write(f"\n\n{text}\n}}" if text.count("'") % 2 else f"\n\n{text}")
    )
    assert message.replace("@", "3") in findings_of_config[0]
    assert len(findings_of_config) == 1


def test_all_mistakes_at_once_in_the_order_of_the_text(write):
    texts = [text for text, _ in MISTAKES if "'x }" not in text]
    findings_of_config = findings(config.load, write("\n".join(texts)))
    assert {int(line.split(":")[1]) for line in findings_of_config} == set(range(1, len(texts) + 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data {\n train {\n", "x.config:2:8: '{' is never closed"),
        ("data {\n } }", "x.config:2:4: '}' closes nothing"),
        ("data {\n key_columns: [ }\n", "x.config:2:17: '}' where '[' of line 2 is open"),
    ],
)
def test_brackets_that_do_not_match(write, text, message):
    assert findings(config.load, write(text)) == [message]


@pytest.mark.parametrize("opening", ["a {", "features { id {", "a: [", "<"])
@pytest.mark.parametrize("close", [True, False])
def test_deep_nesting_is_refused_without_recursion(write, opening, close):
    closing = {"{": "}", "[": "]", "<": ">"}
    ends = "".join(closing[c] for c in reversed(opening) if c in closing) if close else ""
    assert findings(config.load, write(opening * 20_000 + ends * 20_000))


def test_files_that_are_not_texts(write, tmp_path):
    (tmp_path / "quick.config").write_bytes(b"data { \xff }")
    assert findings(config.load, "quick.config") == [
        "quick.config: not a text file in UTF-8 (invalid start byte at byte 7)"
    ]
    assert findings(config.load, "quik.config") == ["quik.config: no such file. Did you mean quick.config?"]
    named = "is a folder; name a .config file, such as quick.config"
    assert findings(config.load, str(tmp_path)) == [f"{tmp_path}: {named}"]
    (tmp_path / "empty").mkdir()
    assert findings(config.load, "empty") == ["empty: is a folder; name a .config file; none is in it"]
    (tmp_path / "bom.config").write_bytes(b"\xef\xbb\xbftrain { seed: 3 }")
    assert config.load("bom.config").train.seed == 3


PIECES = [
    *"{}[]<>:;,\"'\\#-.0\n",
    "1e999",
    "nan",
    "inf",
    "0x1F",
    "-",
    "'a",
    "\\x",
    "features {",
    "id {",
    "train",
    "é",
    "\0",
]
PIECES += [
    "num_steps: 3",
    "sides: USER",
    "hstu {}",
    "metrics { auc {} }",
    "9" * 30,
    ": [",
    "batch_size",
    "\udc80",
]


def mutate(text: str, rng: random.Random) -> str:
    """A few random edits: pieces put in, cut out, doubled, moved."""
    for _ in range(rng.randint(1, 6)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((1, 2, 8, 40)))
        place = rng.randrange(len(text) + 1)
        text = rng.choice(
            (
                lambda t, a, b, c: t[:a] + rng.choice(PIECES) + t[a:],
                lambda t, a, b, c: t[:a] + rng.choice(PIECES) + t[b:],
                lambda t, a, b, c: t[:a] + t[b:],
                lambda t, a, b, c: t[:b] + t[a:],
                lambda t, a, b, c: t[:c] + t[a:b] + t[c:],
            )
        )(text, start, end, place)
    return text


@pytest.mark.parametrize(
    "count", [400, pytest.param(20_000, marks=pytest.mark.slow)], ids=lambda count: f"{count} texts"
)
def test_mutated_texts_are_findings_with_a_line_or_valid(tmp_path, count):
    rng = random.Random(count)
    path = tmp_path / "x.config"
    valid = 0
    for _ in range(count):
        text = mutate(rng.choice((RANKER, RETRIEVER)), rng)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        try:
            pipeline = config.load(path)
        except ConfigError as error:
            assert error.findings
            if "UTF-8" not in error.findings[0]:
                assert findings(config.prepare, path)[: len(error.findings)] == error.findings
            for finding in error.findings:
                assert re.match(rf"{re.escape(str(path))}:(\d+: |\d+:\d+: | not a text)", finding)
            continue
        valid += 1
        # What we accept means what protobuf's parser says, and stands resolving, checking and printing.
        assert pipeline == text_format.Parse(path.read_text(encoding="utf-8-sig"), pb.Pipeline())
        assert isinstance(config.check(pipeline), list)
        resolved = config.resolve(pipeline, read_files=False)
        path.write_text(config.to_text(resolved.pipeline, resolved.origins), encoding="utf-8")
        assert config.load(path) == resolved.pipeline
    assert valid > count / 100
