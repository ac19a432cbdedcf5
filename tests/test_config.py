"""Loading, overriding, resolving and printing configs. What a text means, protobuf's own parser decides."""

import random
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf import text_format

from recsys import config
from recsys import protos as pb
from recsys.errors import ConfigError
from tests.config_texts import RANKER, RETRIEVER


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a text to x.config in the working folder and returns its name."""
    monkeypatch.chdir(tmp_path)

    def to_file(text: str) -> str:
        (tmp_path / "x.config").write_text(text, encoding="utf-8")
        return "x.config"

    return to_file


def findings(load, *arguments) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    return caught.value.findings


@pytest.mark.parametrize("text", [RANKER, RETRIEVER])
def test_a_text_means_what_protobuf_says(write, text):
    assert config.load(write(text)) == text_format.Parse(text, pb.Pipeline())


@pytest.mark.parametrize("text", [RANKER, RETRIEVER])
def test_examples_are_valid(write, text):
    ready = config.prepare(write(text), read_files=False)
    assert ready.warnings == []


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
    ("data { batch_size: 2.5 }", "x.config:@: data.batch_size: expected a whole number (int32), found 2.5"),
    ("data { batch_size: 3000000000 }", "x.config:@: data.batch_size: 3000000000 does not fit int32"),
    ("data { batch_size: x }", "x.config:@: data.batch_size: expected a whole number (int32), found x"),
    ("data { batch_size: 010 }", "x.config:@: data.batch_size: expected a whole number (int32), found 010"),
    ("data { batch_size 3 }", "x.config:@: data.batch_size: expected ':' and a whole number"),
    ("data { batch_size: 3 batch_size: 4 }", "x.config:@: data.batch_size: set twice, first in line @"),
    (
        "data { train { csv {} parquet {} } }",
        "x.config:@: data.train.parquet: only one of a kind, and line @ chose csv",
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
    ("data { key_columns: ['a' 'b',] }", "x.config:@:29: a comma behind the last value of a list"),
    (
        "data { train { synthetic { num_rows: [1] } } }",
        "data.train.synthetic.num_rows: expected a whole number (int64)",
    ),
    ("features { sides: USED }", "x.config:@: features[0].sides[0]: no value USED. Did you mean USER?"),
    (
        "features { sides: 1 }",
        "x.config:@: features[0].sides[0]: expected one of USER, HISTORY, CANDIDATE, found 1",
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
    found = findings(config.load, write(f"\n\n{text}\n}}" if text.count("'") % 2 else f"\n\n{text}"))
    assert message.replace("@", "3") in found[0]
    assert len(found) == 1


def test_all_mistakes_at_once_in_the_order_of_the_text(write):
    texts = [text for text, _ in MISTAKES if "'x }" not in text]
    found = findings(config.load, write("\n".join(texts)))
    assert {int(line.split(":")[1]) for line in found} == set(range(1, len(texts) + 1))


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
    assert findings(config.load, write(opening * 100_000 + ends * 100_000))


def test_mistakes_in_the_text_do_not_hide_those_in_its_meaning(write):
    overrides = ["data.bath_size=4", "train.num_steps=x", "model.ranker.tasks[0].metrics=[{ndcg {}}]"]
    overrides += ["model.ranker.mixer.hstu.num_heads=0", "model.ranker.mixer.hstu.qk_dim=y"]
    paths = [line.split(": ")[1] for line in findings(config.prepare, write(RANKER), overrides)]
    # Not train.num_epochs and not model.ranker.mixer.hstu.qk_dim for being absent.
    assert paths == [
        "data.bath_size",
        "train.num_steps",
        "model.ranker.mixer.hstu.qk_dim",
        "model.ranker.mixer.hstu.num_heads",
        "model.ranker.tasks[0].metrics[0].ndcg",
    ]


def test_files_that_are_not_texts(write, tmp_path):
    (tmp_path / "quick.config").write_bytes(b"data { \xff }")
    assert findings(config.load, "quick.config") == [
        "quick.config: not a text file in UTF-8 (invalid start byte at byte 7)"
    ]
    assert findings(config.load, "quik.config") == ["quik.config: no such file. Did you mean quick.config?"]
    assert "directory" in findings(config.load, str(tmp_path))[0]
    (tmp_path / "bom.config").write_bytes(b"\xef\xbb\xbftrain { seed: 3 }")
    assert config.load("bom.config").train.seed == 3


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("train.num_steps=7", "train { num_steps: 7 }"),
            ("features[1].id.embedding_dim=9", "features { } features { id { embedding_dim: 9 } }"),
            ("data.train.parquet.paths=['a','b']", "data { train { parquet { paths: 'a' paths: 'b' } } }"),
            ("data.train.parquet.paths=a,b", "data { train { parquet { paths: 'a,b' } } }"),
            ("data.vocabulary_dir=some/where=1", "data { vocabulary_dir: 'some/where=1' }"),
            ("data.vocabulary_dir='x y'", "data { vocabulary_dir: 'x y' }"),
            (
                "train.schedule={warmup_steps: 5 cosine {}}",
                "train { schedule { warmup_steps: 5 cosine {} } }",
            ),
            ("model.precision=BF16", "model { precision: BF16 }"),
            ("features[0].id.multi_valued=true", "features { id { multi_valued: true } } features {}"),
            ("features[0].sides=[USER, HISTORY]", "features { sides: [USER, HISTORY] } features {}"),
        ],
    )
    def test_sets_one_field(self, write, override, expected):
        start = "features {} features {}"
        wanted = text_format.Parse(expected, pb.Pipeline())
        if not wanted.features:
            wanted.features.add()
            wanted.features.add()
        assert config.load(write(start), [override]) == wanted

    def test_replaces_and_clears(self, write):
        name = write(
            "train { num_epochs: 3 schedule { warmup_steps: 9 linear {} } } data { key_columns: ['a', 'b'] }"
        )
        overrides = [
            "train.num_steps=5",
            "train.schedule={cosine{}}",
            "data.key_columns=['c']",
        ]
        wanted = "train { num_steps: 5 schedule { cosine {} } } data { key_columns: 'c' }"
        assert config.load(name, overrides) == text_format.Parse(wanted, pb.Pipeline())

    def test_the_last_one_counts(self, write):
        assert config.load(write(""), ["train.seed=4", "train.seed=5"]).train.seed == 5

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("train.num_step=1", "train.num_step: no such field. Did you mean num_steps?"),
            ("train.num_steps", "expected path=value"),
            ("train.num_steps=many", "train.num_steps: expected a whole number (int64), found many"),
            ("train.num_steps=1 2", "unexpected '2'"),
            ("train.num_steps.x=1", "train.num_steps: has no fields of its own"),
            ("train[0].seed=1", "train[0]: not repeated; leave [0] out"),
            ("features.name=a", "features: repeated; say which one, for example features[0]"),
            ("features[2].name=a", "features[2]: there are 1, counted from 0"),
            ("features[0]={}", "features[0]: one element cannot be replaced"),
            ("features[-1].name=a", "'features[-1]' is not the name of a field"),
            ("=1", "'' is not the name of a field"),
            (
                "train.schedule={warmup_step: 1}",
                "train.schedule.warmup_step: no such field. Did you mean warmup_steps?",
            ),
            ("train.schedule={", "'{' is never closed"),
            ("train.schedule=5", "train.schedule: expected Schedule in braces, found '5'"),
            ("model.ranker.mixer.sasrec.dropout=0", "sasrec: hstu is chosen; replace it first"),
            ("train.max_grad_norm=inf", "inf is not allowed"),
            ("data.vocabulary_dir=\udcff", "a string that is not valid UTF-8"),
        ],
    )
    def test_mistakes_name_the_flag(self, write, override, message):
        name = write("features {} model { ranker { mixer { hstu {} } } }")
        (found,) = findings(config.load, name, [override])
        assert found.startswith(f"--set {override}: ")
        assert message in found

    def test_findings_of_checks_name_the_flag_too(self, write):
        found = findings(config.prepare, write(RANKER), ["data.batch_size=0"])
        assert "--set data.batch_size=0: data.batch_size: 0 is given; it must be 1 or more" in found


class TestResolve:
    @pytest.mark.parametrize(
        ("path", "value", "origin"),
        [
            ("features[0].id.table", "item_id", "features[0].name"),
            ("features[0].id.embedding_dim", 32, "model.embedding_dim"),
            (
                "features[0].id.vocabulary.file",
                "vocabulary/item_id.parquet",
                "data.vocabulary_dir and id.table",
            ),
            ("features[1].id.embedding_dim", 8, None),
            ("features[3].numeric.bucketize.embedding_dim", 32, "model.embedding_dim"),
            ("data.eval_batch_size", 16, "data.batch_size"),
            ("data.group_column", "user_id", "data.key_columns[0]"),
            # Two USER features, 20 events, 5 candidates.
            ("model.max_seq_len", 27, "contextual tokens + data.max_history_len + data.max_candidates"),
            ("model.ranker.mixer.hstu.v_dim", 16, "model.ranker.mixer.hstu.qk_dim"),
            ("model.ranker.mixer.hstu.scale_len", 27.0, "model.max_seq_len"),
            ("model.ranker.mixer.hstu.bias.num_positions", 27, "model.max_seq_len"),
            ("model.ranker.mixer.hstu.mask.contextual_reads_history", True, "default"),
            ("model.ranker.preprocessor.contextual.positional.num_positions", 28, "model.max_seq_len + 1"),
            ("model.ranker.preprocessor.contextual.positional.origin", pb.PositionalEncoder.END, "default"),
            ("model.ranker.tasks[1].label", "candidate_time", "model.ranker.tasks[1].name"),
            ("model.ranker.tasks[0].weight", 1.0, "default"),
            # Calibration comes first, but has no direction.
            ("train.evaluation.best_metric", "click/auc", "first metric of the model"),
            ("train.dense_optimizer.adamw.lr", 1e-3, "default"),
            ("train.sparse_optimizer.row_wise_adagrad.lr", 0.02, "default"),
            ("export.parity_tolerance", 1e-4, "model.precision"),
        ],
    )
    def test_fills_in_what_a_ranker_leaves_open(self, write, path, value, origin):
        resolved = config.resolve(config.load(write(RANKER)), read_files=False)
        assert at(resolved.pipeline, path) == value
        assert resolved.origins.get(path) == origin

    def test_interleaved_events_and_joined_features_decide_the_length(self, write):
        contextual = "model.ranker.preprocessor.contextual"
        overrides = [f"{contextual}.action_placement=INTERLEAVED", f"{contextual}.joined_contextual={{}}"]
        loaded = config.read(write(RANKER), overrides)
        resolved = config.resolve(loaded.pipeline, read_files=False)
        # One joined token, 20 events of two tokens, 5 candidates.
        assert resolved.pipeline.model.max_seq_len == 46
        origin = "contextual tokens + 2 x data.max_history_len + data.max_candidates"
        assert resolved.origins["model.max_seq_len"] == origin
        assert at(resolved.pipeline, f"{contextual}.positional.num_positions") == 47
        assert resolved.origins[f"{contextual}.joined_contextual.mlp"] == "default"

    def test_lengths_in_events_become_tokens_and_groups_replace_the_simple_form(self, write):
        contextual, hstu = "model.ranker.preprocessor.contextual", "model.ranker.mixer.hstu"
        groups = """[
            {mask {window: 4 prefix: 1 unit: EVENTS}},
            {num_layers: 3 tail_len: 5 tail_unit: EVENTS mask {window: 3}}
        ]"""
        overrides = [f"{contextual}.action_placement=INTERLEAVED", f"{hstu}.layer_groups={groups}"]
        resolved = config.resolve(config.read(write(RANKER), overrides).pipeline, read_files=False)
        mixer = at(resolved.pipeline, hstu)
        assert not mixer.HasField("num_layers") and not mixer.HasField("mask")
        first, second = mixer.layer_groups
        assert (first.num_layers, first.mask.window, first.mask.prefix, first.mask.unit) == (
            2,
            8,
            2,
            pb.TOKENS,
        )
        assert not first.HasField("tail_len")
        assert (second.num_layers, second.tail_len, second.tail_unit) == (3, 10, pb.TOKENS)
        assert (second.mask.window, second.mask.unit) == (3, pb.TOKENS)
        origins = {path.removeprefix(f"{hstu}."): origin for path, origin in resolved.origins.items()}
        assert origins["layer_groups[0].mask.window"] == "4 events, tokens of an event: 2"
        assert origins["layer_groups[0].mask.unit"] == "EVENTS is given"
        assert origins["layer_groups[1].tail_len"] == "5 events, tokens of an event: 2"
        assert origins["layer_groups[0].num_layers"] == "default"
        assert "layer_groups[1].mask.window" not in origins
        assert config.check(resolved.pipeline) == []
        assert config.resolve(resolved.pipeline, read_files=False).pipeline == resolved.pipeline

    def test_a_retrievers_groups_are_blind_to_the_future(self, write):
        loaded = config.read(write(RETRIEVER), ["model.retriever.mixer.sasrec.layer_groups=[{}, {mask {}}]"])
        groups = config.resolve(
            loaded.pipeline, read_files=False
        ).pipeline.model.retriever.mixer.sasrec.layer_groups
        assert [group.mask.contextual_reads_history for group in groups] == [False, False]

    def test_bits_are_those_of_the_candidates_actions(self, write):
        loaded = config.read(write(RANKER), ["model.ranker.tasks[0].label_bits=[0, 2]"])
        resolved = config.resolve(loaded.pipeline, read_files=False)
        assert resolved.pipeline.model.ranker.tasks[0].label == "candidate_actions"
        assert resolved.origins["model.ranker.tasks[0].label"] == "model.ranker.tasks[0].label_bits"

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("model.max_seq_len", 50),
            ("model.retriever.mixer.sasrec.feed_forward_dim", 64),
            ("model.retriever.mixer.sasrec.mask.contextual_reads_history", False),
            ("model.retriever.preprocessor.uih.positional.origin", pb.PositionalEncoder.START),
            ("model.retriever.preprocessor.uih.positional.num_positions", 51),
            ("features[0].id.vocabulary.file", "vocabulary/movies.parquet"),
            ("train.evaluation.best_metric", "ndcg@5"),
        ],
    )
    def test_fills_in_what_a_retriever_leaves_open(self, write, path, value):
        assert at(config.resolve(config.load(write(RETRIEVER)), read_files=False).pipeline, path) == value

    def test_a_package_of_three_digits_is_compared_with_two(self, write):
        resolved = config.resolve(
            config.load(write(RANKER), ["model.precision=BF16"]), read_files=False
        ).pipeline
        assert resolved.export.parity_tolerance == 2e-2

    def test_absence_with_a_meaning_stays(self, write):
        resolved = config.resolve(config.load(write(RETRIEVER)), read_files=False).pipeline
        assert not resolved.train.HasField("max_grad_norm")
        assert not resolved.model.retriever.mixer.sasrec.mask.HasField("window")
        assert not resolved.model.retriever.preprocessor.uih.HasField("action")
        assert not resolved.train.evaluation.HasField("every_steps")

    def test_tables_that_the_dense_optimizer_trains_get_no_sparse_one(self, write):
        pipeline = config.load(write(RANKER), ["model.embedding.placement=REPLICATED"])
        assert not config.resolve(pipeline, read_files=False).pipeline.train.HasField("sparse_optimizer")

    @pytest.mark.parametrize("text", [RANKER, RETRIEVER, ""])
    def test_twice_is_once(self, write, text):
        pipeline = config.load(write(text))
        before = pb.Pipeline.FromString(pipeline.SerializeToString())
        once = config.resolve(pipeline, read_files=False)
        twice = config.resolve(once.pipeline, read_files=False)
        assert twice.pipeline == once.pipeline
        assert twice.origins == {}
        assert pipeline == before

    @pytest.mark.parametrize("text", [RANKER, RETRIEVER])
    def test_printed_it_loads_as_itself(self, write, text):
        resolved = config.resolve(config.load(write(text)), read_files=False)
        printed = config.to_text(resolved.pipeline, resolved.origins)
        assert config.load(write(printed)) == resolved.pipeline
        assert text_format.Parse(printed, pb.Pipeline()) == resolved.pipeline

    def test_origins_stand_behind_their_fields(self, write):
        resolved = config.resolve(config.load(write(RANKER)), read_files=False)
        printed = config.to_text(resolved.pipeline, resolved.origins)
        assert (
            "  max_seq_len: 27  # contextual tokens + data.max_history_len + data.max_candidates\n" in printed
        )
        assert "  batch_size: 16\n" in printed
        assert len(re.findall(r"  # ", printed)) == len(resolved.origins)


class TestVocabularies:
    @pytest.fixture
    def vocabulary(self, write, tmp_path):
        (tmp_path / "vocabulary").mkdir()

        def make(**columns):
            pq.write_table(pa.table(columns), tmp_path / "vocabulary" / "movies.parquet")

        make(id=pa.array([5, 3, 9]))
        return make

    def test_size_comes_from_the_file(self, write, vocabulary):
        ready = config.prepare(write(RETRIEVER.replace("size: 10", "")))
        assert ready.pipeline.features[0].id.vocabulary.size == 3
        assert ready.origins["features[0].id.vocabulary.size"] == "vocabulary/movies.parquet"

    def test_another_size_is_a_finding(self, write, vocabulary):
        (found,) = findings(config.prepare, write(RETRIEVER))
        assert found.startswith(
            "x.config:8: features[0].id.vocabulary.size: 10 is given, vocabulary/movies.parquet has 3"
        )

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"name": ["a"]}, "has no column id of type int64 or string"),
            ({"id": [1.5]}, "has no column id of type int64 or string"),
            ({"id": pa.array([], pa.int64())}, "has no ids"),
        ],
    )
    def test_other_files_are_findings(self, write, vocabulary, columns, message):
        vocabulary(**columns)
        (found,) = findings(config.prepare, write(RETRIEVER.replace("size: 10", "")))
        assert message in found

    def test_a_missing_or_broken_file_is_a_finding_beside_others(self, write, vocabulary, tmp_path):
        (tmp_path / "vocabulary" / "movies.parquet").write_bytes(b"PAR1 no parquet")
        found = findings(config.prepare, write(RETRIEVER), ["train.seed=-1"])
        assert len(found) == 2
        assert "cannot be read as parquet" in found[1]
        (tmp_path / "vocabulary" / "movies.parquet").unlink()
        (found,) = findings(config.prepare, write(RETRIEVER))
        assert "x.config:8: features[0].id.vocabulary.file: no file vocabulary/movies.parquet" in found

    def test_data_that_is_not_prepared_is_one_finding(self, write, vocabulary):
        second = 'features { name: "brand" sides: HISTORY id { vocabulary {} } }\n'
        text = RETRIEVER.replace("size: 10", "") + second
        (found,) = findings(config.prepare, write(text.replace('"vocabulary/"', '"nowhere"')))
        assert found == (
            "x.config:5: data.vocabulary_dir: none of 2 vocabularies is in nowhere; "
            "prepare the data first, with a tool of scripts/"
        )
        (found,) = findings(config.prepare, write(text))
        assert "features[1].id.vocabulary.file: no file vocabulary/brand.parquet" in found


def at(message, path):
    """The value at a path such as `a.b[0].c`."""
    for step in path.split("."):
        name, _, index = step.rstrip("]").partition("[")
        assert index or message.HasField(name), f"{name} is not set"
        message = getattr(message, name)[int(index)] if index else getattr(message, name)
    return message


def test_no_torch_is_needed():
    code = "import sys; from recsys import config, cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
        other = rng.randrange(len(text) + 1)
        text = rng.choice(
            (
                lambda t, a, b, c: t[:a] + rng.choice(PIECES) + t[a:],
                lambda t, a, b, c: t[:a] + rng.choice(PIECES) + t[b:],
                lambda t, a, b, c: t[:a] + t[b:],
                lambda t, a, b, c: t[:b] + t[a:],
                lambda t, a, b, c: t[:c] + t[a:b] + t[c:],
            )
        )(text, start, end, other)
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
