"""Values that a config leaves out: where they come from, and what the files of vocabularies say."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf import text_format

from recsys import config
from recsys import protos as pb
from tests.config_texts import RANKER, RETRIEVER, findings


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
def test_fills_in_what_a_ranker_leaves_open(write, path, value, origin):
    resolved = config.resolve(config.load(write(RANKER)), read_files=False)
    assert at(resolved.pipeline, path) == value
    assert resolved.origins.get(path) == origin


def test_interleaved_events_and_joined_features_decide_the_length(write):
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


def test_lengths_in_events_become_tokens_and_groups_replace_the_simple_form(write):
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


def test_a_retrievers_groups_are_blind_to_the_future(write):
    loaded = config.read(write(RETRIEVER), ["model.retriever.mixer.sasrec.layer_groups=[{}, {mask {}}]"])
    groups = config.resolve(
        loaded.pipeline, read_files=False
    ).pipeline.model.retriever.mixer.sasrec.layer_groups
    assert [group.mask.contextual_reads_history for group in groups] == [False, False]


def test_bits_are_those_of_the_candidates_actions(write):
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
def test_fills_in_what_a_retriever_leaves_open(write, path, value):
    assert at(config.resolve(config.load(write(RETRIEVER)), read_files=False).pipeline, path) == value


@pytest.mark.parametrize(
    ("overrides", "seen", "remove_history", "warns"),
    [
        ([], pb.Retriever.REMOVE, True, False),
        (["predict.remove_history=false"], pb.Retriever.KEEP, False, False),
        (["model.retriever.seen=KEEP"], pb.Retriever.KEEP, False, False),
        (["model.retriever.seen=REMOVE", "predict.remove_history=false"], pb.Retriever.REMOVE, False, True),
    ],
)
def test_evaluation_and_prediction_follow_one_rule_for_seen_items(
    write, overrides, seen, remove_history, warns
):
    """Also for a config that is older than `seen` and says `remove_history`."""
    ready = config.read(write(RETRIEVER), overrides)
    resolved = config.resolve(ready.pipeline, read_files=False).pipeline
    assert (resolved.model.retriever.seen, resolved.predict.remove_history) == (seen, remove_history)
    said = [line for line in config.warnings(ready.pipeline, ready.locations) if "remove_history" in line]
    assert bool(said) == warns


def test_a_package_of_three_digits_is_compared_with_two(write):
    resolved = config.resolve(config.load(write(RANKER), ["model.precision=BF16"]), read_files=False).pipeline
    assert resolved.export.parity_tolerance == 2e-2


@pytest.mark.parametrize(
    ("written", "overrides", "tolerance"),
    [
        (None, ["model.precision=BF16"], 2e-2),
        (None, ["model.precision=BF16", "export.parity_tolerance=0.3"], 0.3),
        (0.05, ["model.precision=BF16"], 0.05),
        (None, ["export.max_batch_size=8"], 1e-4),
    ],
)
def test_a_run_in_another_precision_gets_its_tolerance(tmp_path, written, overrides, tolerance):
    chosen = [] if written is None else [f"export.parity_tolerance={written}"]
    run = config.prepare("configs/quickstart.config", chosen)
    path = tmp_path / config.FILE_NAME
    path.write_text(config.to_text(run.pipeline))
    assert config.prepare(path, overrides).pipeline.export.parity_tolerance == tolerance


def test_absence_with_a_meaning_stays(write):
    resolved = config.resolve(config.load(write(RETRIEVER)), read_files=False).pipeline
    assert not resolved.train.HasField("max_grad_norm")
    assert not resolved.model.retriever.mixer.sasrec.mask.HasField("window")
    assert not resolved.model.retriever.preprocessor.uih.HasField("action")
    assert not resolved.train.evaluation.HasField("every_steps")


def test_tables_that_the_dense_optimizer_trains_get_no_sparse_one(write):
    pipeline = config.load(write(RANKER), ["model.embedding.placement=REPLICATED"])
    assert not config.resolve(pipeline, read_files=False).pipeline.train.HasField("sparse_optimizer")


@pytest.mark.parametrize("text", [RANKER, RETRIEVER, ""])
def test_twice_is_once(write, text):
    pipeline = config.load(write(text))
    before = pb.Pipeline.FromString(pipeline.SerializeToString())
    once = config.resolve(pipeline, read_files=False)
    twice = config.resolve(once.pipeline, read_files=False)
    assert twice.pipeline == once.pipeline
    assert twice.origins == {}
    assert pipeline == before


@pytest.mark.parametrize("text", [RANKER, RETRIEVER])
def test_printed_it_loads_as_itself(write, text):
    resolved = config.resolve(config.load(write(text)), read_files=False)
    printed = config.to_text(resolved.pipeline, resolved.origins)
    assert config.load(write(printed)) == resolved.pipeline
    assert text_format.Parse(printed, pb.Pipeline()) == resolved.pipeline


def test_origins_stand_behind_their_fields(write):
    resolved = config.resolve(config.load(write(RANKER)), read_files=False)
    printed = config.to_text(resolved.pipeline, resolved.origins)
    assert "  max_seq_len: 27  # contextual tokens + data.max_history_len + data.max_candidates\n" in printed
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
        (finding,) = findings(config.prepare, write(RETRIEVER))
        assert finding.startswith(
            "x.config:8: features[0].id.vocabulary.size: 10 is given, vocabulary/movies.parquet has 3"
        )

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"name": ["a"]}, "movies.parquet has no column id, or several; it has name; "),
            ({"id": [1.5]}, "movies.parquet: its column id is double; ids are integers or strings; "),
            ({"id": pa.array([True])}, "movies.parquet: its column id is bool; "),
            ({"id": pa.array([], pa.int64())}, "has no ids"),
        ],
    )
    def test_other_files_are_findings(self, write, vocabulary, columns, message):
        vocabulary(**columns)
        (finding,) = findings(config.prepare, write(RETRIEVER.replace("size: 10", "")))
        assert message in finding

    @pytest.mark.parametrize(
        "ids",
        [
            pa.array([5, 3], pa.int32()),
            pa.array([5, 3], pa.uint64()),
            pa.array(["a", "b"], pa.large_string()),
            pa.array(["a", "b"]).dictionary_encode(),
        ],
        ids=lambda ids: str(ids.type),
    )
    def test_ids_may_have_any_type_that_events_may_have(self, write, vocabulary, ids):
        vocabulary(id=ids)
        ready = config.prepare(write(RETRIEVER.replace("size: 10", "")))
        assert ready.pipeline.features[0].id.vocabulary.size == 2

    def test_a_missing_or_broken_file_is_a_finding_beside_others(self, write, vocabulary, tmp_path):
        (tmp_path / "vocabulary" / "movies.parquet").write_bytes(b"PAR1 no parquet")
        finding = findings(config.prepare, write(RETRIEVER), ["train.seed=-1"])
        assert len(finding) == 2
        assert "cannot be read as parquet" in finding[1]
        (tmp_path / "vocabulary" / "movies.parquet").unlink()
        (finding,) = findings(config.prepare, write(RETRIEVER))
        assert "x.config:8: features[0].id.vocabulary.file: no file vocabulary/movies.parquet" in finding

    def test_data_that_is_not_prepared_is_one_finding(self, write, vocabulary, tmp_path):
        second = 'features { name: "brand" sides: HISTORY id { vocabulary {} } }\n'
        text = RETRIEVER.replace("size: 10", "") + second
        (finding,) = findings(config.prepare, write(text.replace('"vocabulary/"', '"nowhere"')))
        assert finding == (
            "x.config:5: data.vocabulary_dir: none of 2 vocabularies is in nowhere; "
            f"prepare the data first, with python -m recsys.prepare. Relative paths count from {tmp_path}"
        )
        (finding,) = findings(config.prepare, write(text.replace('"vocabulary/"', f'"{tmp_path}/nowhere"')))
        assert finding.endswith("prepare the data first, with python -m recsys.prepare")
        (finding,) = findings(config.prepare, write(text))
        assert "features[1].id.vocabulary.file: no file vocabulary/brand.parquet" in finding
        assert finding.endswith(f"Relative paths count from {tmp_path}")


def at(message, path):
    """The value at a path such as `a.b[0].c`."""
    for step in path.split("."):
        name, _, index = step.rstrip("]").partition("[")
        assert index or message.HasField(name), f"{name} is not set"
        message = getattr(message, name)[int(index)] if index else getattr(message, name)
    return message
