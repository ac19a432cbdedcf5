"""Each rule of a config: a valid config with one thing changed gives this finding and no other."""

import pytest
from google.protobuf import text_format

from recsys import config
from recsys import protos as pb
from tests.config_texts import RANKER, RETRIEVER, load

TASK = "model.ranker.tasks[0]"
HSTU = "model.ranker.mixer.hstu"
CHANNELS = "model.ranker.preprocessor.contextual.channels"
STACK = "channel: 'a' hstu {qk_dim: 4}"
ITEM = "features[0]"
UIH = "model.retriever.preprocessor.uih"
ENCODER = "model.retriever.item_encoder"

RANKER_RULES = [
    ("features=[]", "features: not set"),
    ("data.train=", "data.train: not set"),
    ("data.train.parquet.paths=", "data.train.parquet.paths: not set"),
    ("data.validation={}", "data.validation: nothing is chosen; set one of parquet, csv, synthetic"),
    ("data.validation={csv {paths: 'a' delimiter: ';;'}}", "data.validation.csv.delimiter: ';;' is given"),
    ("data.validation={csv {paths: 'a' delimiter: '|'}}", "data.validation.csv.list_delimiter: the same as"),
    (
        "data.test={synthetic {min_history_len: 9 max_history_len: 8}}",
        "data.test.synthetic.min_history_len: 9 is given, above max_history_len, which is 8",
    ),
    (
        "data.test={synthetic {history_len_exponent: 1.2}}",
        "data.test.synthetic.history_len_exponent: 1.2 is given, so that an empty history would have",
    ),
    ("data.test={synthetic {min_candidates: 5}}", "data.test.synthetic.min_candidates: 5 is given, above"),
    ("data.stochastic_length={alpha: 1}", "data.stochastic_length.alpha: 1.0 is given; it must be above 1"),
    ("data.stochastic_length={alpha: 2.5}", "data.stochastic_length.alpha: 2.5 is given"),
    (f"{CHANNELS}=[{{name: 'a'}}]", f"{CHANNELS}: mixer.hstu mixes one sequence; use mixer.mixture"),
    (
        f"model.ranker.mixer={{mixture {{stacks {{{STACK}}}}}}}",
        f"model.ranker.mixer.mixture.stacks: the stacks are for 'a'; {CHANNELS} has none",
    ),
    ("data.batch_size=0", "data.batch_size: 0 is given; it must be 1 or more"),
    ("data.num_workers=-1", "data.num_workers: -1 is given; it must be 0 or more"),
    ("data.max_candidates=", "model.max_seq_len: cannot be derived, since data.max_candidates is not set"),
    ("model.max_seq_len=26", "model.max_seq_len: 26 is given; 2 contextual tokens, data.max_history_len 20"),
    ("data.vocabulary_dir=", f"{ITEM}.id.vocabulary.file: not set; name the file here, or the folder"),
    (f"{ITEM}.name=", f"{ITEM}.name: not set"),
    (f"{ITEM}.name=a.b", f"{ITEM}.name: 'a.b' is given; use letters"),
    (f"{ITEM}.id.table=a b", f"{ITEM}.id.table: 'a b' is given; use letters"),
    (f"{ITEM}.id.embedding_dim=6", f"{ITEM}.id.embedding_dim: 6 is given; the width of a sharded table"),
    (
        "data.key_columns=['user_id', 'day', 'user_id']",
        "data.key_columns: 'user_id' is named twice; name each",
    ),
    (f"{TASK}.name=user_id", f"{TASK}.name: 'user_id' is also a column of predictions, that of data.key_co"),
    (
        f"{TASK}.name=candidate_item_id",
        f"{TASK}.name: 'candidate_item_id' is also a column of predictions, that of the candidates; choose",
    ),
    (f"{ITEM}.sides=", f"{ITEM}.sides: not set"),
    (f"{ITEM}.sides=[HISTORY, CANDIDATE, HISTORY]", f"{ITEM}.sides: a side is named twice"),
    (f"{ITEM}.id=", f"{ITEM}: nothing is chosen; set one of id, numeric"),
    (f"{ITEM}.id={{}}", f"{ITEM}.id: nothing is chosen; set one of vocabulary, hash"),
    (f"{ITEM}.id.embedding_dim=0", f"{ITEM}.id.embedding_dim: 0 is given"),
    (
        f"{ITEM}.id.vocabulary.unknown_rate=1",
        f"{ITEM}.id.vocabulary.unknown_rate: 1.0 is given; it must be at least 0",
    ),
    ("features[1].id.hash.num_buckets=", "features[1].id.hash.num_buckets: not set"),
    ("features[1].name=item_id", "features[1].name: 'item_id' is also features[0]", 3),
    (
        "features[2].name=uih_author",
        "features[2].name: its column uih_author is also that of feature author",
        2,
    ),
    ("features[2].name=uih_age", "features[2].name: 'uih_age' is a USER feature, but uih_ begins"),
    (
        "features[2].name=request_time",
        "features[2].name: its column request_time holds the time of the request",
    ),
    ("features[2].name=negatives", "features[2].name: its column negatives holds the negatives"),
    ("features[2].name=candidate_click", f"{TASK}.label: candidate_click is also an input", 2),
    (
        "features[1].name=timestamps",
        "features[1].name: its column uih_timestamps holds the times of events",
        2,
    ),
    ("features[1].name=watch_time", "features[1].name: its column uih_watch_time holds"),
    (
        "features[1].id.table=city",
        "features[2].id.embedding_dim: 32, but features[1] of the same table city has 8",
        2,
    ),
    ("features[2].id.table=age", "features[3].name: table age belongs to features[2]"),
    ("features[3].numeric={}", "features[3].numeric: nothing is chosen; set one of normalize, bucketize"),
    (
        "features[3].numeric={normalize {std: 0}}",
        "features[3].numeric.normalize.std: 0.0 is given; it must be above 0",
    ),
    (
        "features[3].numeric.bucketize.boundaries=[1, 1]",
        "features[3].numeric.bucketize.boundaries: they must increase",
    ),
    ("features[3].numeric.bucketize.boundaries=", "features[3].numeric.bucketize.boundaries: not set"),
    ("model={}", "model: nothing is chosen; set one of ranker, retriever"),
    ("model.embedding_dim=-2", "model.embedding_dim: -2 is given"),
    ("model.ranker.tasks=", "model.ranker.tasks: not set"),
    ("model.ranker.head=", "model.ranker.head: not set"),
    ("model.ranker.mixer={}", "model.ranker.mixer: nothing is chosen; set one of hstu, sasrec"),
    (
        "model.ranker.preprocessor={uih {}}",
        "model.ranker.preprocessor.uih: does not fit a ranker; use contextual",
    ),
    (f"{TASK}.name=", f"{TASK}.name: not set", 1),
    (f"{TASK}.name=a/b", f"{TASK}.name: 'a/b' is given"),
    (f"{TASK}.name=time", f"{TASK}.name: 'time' is the name of 2 tasks", 2),
    (f"{TASK}.label=request_time", f"{TASK}.label: request_time holds the time of the request"),
    (f"{TASK}.label=candidate_author", f"{TASK}.label: candidate_author is also an input"),
    (f"{TASK}.weight=-1", f"{TASK}.weight: -1.0 is given; it must be 0 or more"),
    (f"{TASK}.loss=", f"{TASK}.loss: not set"),
    (
        f"{TASK}.loss={{softmax {{}}}}",
        f"{TASK}.loss.softmax: is a loss of retrieval; use one of binary_cross_entropy",
    ),
    (
        f"{TASK}.loss={{focal {{alpha: 1}}}}",
        f"{TASK}.loss.focal.alpha: 1.0 is given; it must be between 0 and 1",
    ),
    (
        f"{TASK}.loss={{mean_squared_error {{}}}}",
        f"{TASK}.metrics[1].auc: does not fit a regression task; use one of",
    ),
    (
        f"{TASK}.metrics=[{{hit_rate {{}}}}]",
        f"{TASK}.metrics[0].hit_rate: does not fit a binary task; use one of auc",
    ),
    (f"{TASK}.metrics=[{{}}]", f"{TASK}.metrics[0]: nothing is chosen; set one of auc"),
    (
        f"{TASK}.metrics=[{{auc {{}}}}, {{auc {{}}}}]",
        f"{TASK}.metrics[1]: click/auc is also {TASK}.metrics[0]; remove one",
    ),
    (
        f"{TASK}.loss={{binary_cross_entropy {{label_smoothing: 1}}}}",
        f"{TASK}.loss.binary_cross_entropy.label_smoothing: 1.0 is given; it must be at least 0 and below 1",
    ),
    (
        f"{TASK}.loss={{jrc {{pointwise_share: 1.1}}}}",
        f"{TASK}.loss.jrc.pointwise_share: 1.1 is given; it must be from 0 to 1",
    ),
    (
        f"{TASK}.loss={{pairwise {{mean_squared_error {{}}}}}}",
        f"{TASK}.metrics[1].auc: does not fit a regression task; use one of",
    ),
    (f"{TASK}.label_bits=[3, 63]", f"{TASK}.label_bits[1]: 63 is given; it must be from 0 to 62"),
    (f"{TASK}.label_bits=[3, 5, 3]", f"{TASK}.label_bits: a bit is named twice; name each once"),
    (
        "model.ranker.tasks[1].label_bits=[3]",
        "model.ranker.tasks[1].label_bits: bits make labels 0 and 1, but the loss is a regression loss",
    ),
    (
        "model.ranker.tasks=[{name: 'a' label: 'x' label_bits: 1 loss {jrc {}} metrics {auc {}}}, "
        "{name: 'b' label: 'x' loss {focal {}}}]",
        "tasks[1].label_bits: x is one column; this task reads it as a number, tasks[0] its bits; give them",
    ),
    (
        f"{TASK}.weight_column=candidate_author",
        f"{TASK}.weight_column: candidate_author is also the column of",
    ),
    (
        f"{TASK}.weight_column=uih_value",
        f"{TASK}.weight_column: uih_value is given; a ranker has weights in lists candidate_*, or",
    ),
    (
        f"{TASK}.weight_column=candidate_timestamps",
        f"{TASK}.weight_column: candidate_timestamps holds the times of candidates",
    ),
    (
        "model.ranker.tasks=[{name: 'a' label: 'x' label_bits: 1 loss {jrc {}} metrics {auc {}}}, "
        "{name: 'b' weight_column: 'x' loss {focal {}}}]",
        "tasks[1].weight_column: x holds labels as bits; choose another column",
    ),
    (f"{TASK}.given_task=click", f"{TASK}.given_task: 'click' is this task itself; name another one"),
    (f"{TASK}.given_task=tim", f"{TASK}.given_task: no task is called 'tim'. Did you mean time?"),
    (
        f"{TASK}.given_task=time",
        f"{TASK}.given_task: 'time' is a regression; only a task with labels 0 and 1",
    ),
    ("model.ranker.head={mmoe {num_experts: 0}}", "head.mmoe.num_experts: 0 is given; it must be 1 or more"),
    ("model.ranker.head={ple {expert {hidden: 0}}}", "head.ple.expert.hidden[0]: 0 is given"),
    ("model.ranker.mixer.hstu.qk_dim=", "model.ranker.mixer.hstu.qk_dim: not set"),
    (
        "model.ranker.mixer.hstu.dropout=1",
        "model.ranker.mixer.hstu.dropout: 1.0 is given; it must be at least 0 and below 1",
    ),
    (
        "model.ranker.mixer.hstu.scale_len=0",
        "model.ranker.mixer.hstu.scale_len: 0.0 is given; it must be above 0",
    ),
    ("model.ranker.mixer.hstu.mask={window: 0}", "model.ranker.mixer.hstu.mask.window: 0 is given"),
    (
        f"{HSTU}={{qk_dim: 4 num_layers: 2 layer_groups {{}}}}",
        f"{HSTU}.num_layers: layer_groups is given too, where each group has its own; give one of the two",
    ),
    (
        f"{HSTU}={{qk_dim: 4 mask {{}} layer_groups {{}}}}",
        f"{HSTU}.mask: layer_groups is given too, where each group has its own; give one of the two",
    ),
    (
        f"{HSTU}.layer_groups=[{{tail_len: 9}}, {{}}, {{tail_len: 5 tail_unit: EVENTS}}, {{tail_len: 6}}]",
        f"{HSTU}.layer_groups[3].tail_len: 6 tokens are given; an earlier group leaves 5, so at most that",
    ),
    (f"{HSTU}.layer_groups=[{{num_layers: 0}}]", f"{HSTU}.layer_groups[0].num_layers: 0 is given"),
    (
        f"{HSTU}.layer_groups=[{{tail_len: -1 tail_unit: EVENTS}}]",
        f"{HSTU}.layer_groups[0].tail_len: -1 is given; it must be from 0 to 16777216",
    ),
    (
        f"{HSTU}.layer_groups=[{{mask {{window: 0 unit: EVENTS}}}}]",
        f"{HSTU}.layer_groups[0].mask.window: 0 is given; it must be from 1",
    ),
    (
        f"{HSTU}.stochastic_depth=1",
        f"{HSTU}.stochastic_depth: 1.0 is given; it must be at least 0 and below 1",
    ),
    (
        "model.ranker.mixer.hstu.backend=refrence",
        "hstu.backend: no backend is called 'refrence'. Did you mean reference?",
    ),
    (
        "model.ranker.mixer.hstu={num_heads: 2 qk_dim: 16 compile: true recompute: [GATED, UVQK]}",
        "hstu.compile: compiled layers cannot recompute NORMED_X or UVQK: leave UVQK out of recompute",
    ),
    (
        "model.ranker.mixer={sasrec {num_heads: 5}}",
        "sasrec.num_heads: 5 does not divide model.embedding_dim, which is 32",
    ),
    (
        "model.ranker.mixer={sasrec {num_heads: 32 rotary {}}}",
        "sasrec.rotary: turns pairs of numbers, but heads are 1 wide; take another num_heads",
    ),
    (
        "model.ranker.mixer={sasrec {rotary {shortest_tokens: 1}}}",
        "sasrec.rotary.shortest_tokens: 1 is given; it must be 2 or more",
    ),
    (
        "model.ranker.mixer={linear {qk_dim: 8 backend: 'sm90'}}",
        "mixer.linear.backend: no backend is called 'sm90'. Allowed here: auto, triton, reference.",
    ),
    ("model.ranker.mixer={linear {}}", "mixer.linear.qk_dim: not set, but required"),
    ("model.ranker.mixer={hybrid {}}", "mixer.hybrid.mixers: not set, but required"),
    (
        "model.ranker.mixer={hybrid {mixers {linear {qk_dim: 8}} mixers {sasrec {num_heads: 5}}}}",
        "mixer.hybrid.mixers[1].sasrec.num_heads: 5 does not divide model.embedding_dim, which is 32",
    ),
    (
        f"model.ranker.mixer={{hybrid {{mixers {{mixture {{stacks {{{STACK}}}}}}}}}}}",
        "mixer.hybrid.mixers[0].mixture: a mixture takes several sequences and returns only targets",
    ),
    (
        "model.ranker.preprocessor.contextual.action.bits[0].bit=63",
        "bits[0].bit: 63 is given; it must be from 0 to 62",
    ),
    ("model.ranker.preprocessor.contextual.action.bits[0].bit=", "action.bits[0].bit: not set"),
    (
        "model.ranker.preprocessor.contextual.action={bits {name: 'a' bit: 1} bits {name: 'b' bit: 1}}",
        "action.bits[1].bit: 1 is also bit of bits[0]",
    ),
    (
        "model.ranker.preprocessor.contextual.action={watch_time_thresholds: [5, 3]}",
        "action.watch_time_thresholds: they must increase",
    ),
    (
        "model.ranker.preprocessor.contextual={action_placement: INTERLEAVED}",
        "contextual.action_placement: INTERLEAVED makes a token of each action, and `action` is not set",
    ),
    (
        "model.ranker.preprocessor.contextual={content_pad {}}",
        "content_pad: the features of an item are 40 wide and model.embedding_dim is 32; use content_slice",
    ),
    (
        "model.ranker.preprocessor.contextual={action {concatenated {}}}",
        "action.concatenated: there is neither a bit nor a threshold to concatenate",
    ),
    (
        "model.ranker.preprocessor.contextual.joined_contextual.num_tokens=0",
        "joined_contextual.num_tokens: 0 is given; it must be from 1",
    ),
    (
        "model.ranker.postprocessor={timestamp_layer_norm {utc_offset_minutes: 900}}",
        "utc_offset_minutes: 900 is given; it must be from -840 to 840",
    ),
    ("train.num_steps=", "train: nothing is chosen; set one of num_epochs, num_steps"),
    (
        "train.evaluation.best_metric=click/acu",
        "the model has no metric 'click/acu'. Did you mean click/auc?",
    ),
    (
        "train.evaluation.best_metric=click/calibration",
        "click/calibration is best at 1, neither high nor low",
    ),
    ("train.checkpoint.keep=1", "train.checkpoint.keep: 1 is given; it must be 2 or more"),
    (
        "train.dense_optimizer={adamw {beta2: 1}}",
        "adamw.beta2: 1.0 is given; it must be at least 0 and below 1",
    ),
    (
        "train.dense_optimizer={sgd {nesterov: true}}",
        "train.dense_optimizer.sgd.nesterov: it looks ahead along the momentum; set momentum too",
    ),
    (
        'train.sharding.tables=[{table: "item"}]',
        "train.sharding.tables[0].table: there is no table 'item'. Did you mean item_id?",
    ),
    (
        'model.embedding.tables=[{table: "city"}, {table: "city"}]',
        "model.embedding.tables[1].table: 'city' is given twice; put all settings of a table into one entry",
    ),
    ("train.sharding.tables=[{}]", "train.sharding.tables[0].table: not set, but required"),
    (
        'train.sharding.tables=[{table: "city" kind: COLUMN_WISE}]',
        "train.sharding.tables[0].kind: COLUMN_WISE is given; row_wise_adagrad has one state for a row",
    ),
    ("model.embedding.table_precision=BF16", "model.embedding.table_precision: BF16 is given; FBGEMM has no"),
    (
        'model.embedding.tables=[{table: "city" placement: REPLICATED table_precision: FP16}]',
        "model.embedding.tables[0].table_precision: FP16 is given; train.dense_optimizer trains a REPLICATED",
    ),
    (
        "train.sharding={kernel: FUSED_UVM_CACHING cache_load_factor: 0}",
        "train.sharding.cache_load_factor: 0.0 is given; it must be above 0 and at most 1",
    ),
    (
        "train.dense_optimizer.groups=[{}]",
        "train.dense_optimizer.groups[0].parameters: not set, but required",
    ),
    ("train.schedule={step {}}", "train.schedule.step.every_steps: not set, but required"),
]

RETRIEVER_RULES = [
    (
        "data.key_columns=item_id",
        "data.key_columns: 'item_id' is also what predictions call recommended items",
    ),
    (
        "data.key_columns=['user', 'score']",
        "data.key_columns: 'score' is also what predictions call recommen",
    ),
    ("model.retriever.item_feature=", "model.retriever.item_feature: not set"),
    ("model.retriever.item_feature=item", "item_feature: no feature is called 'item'. Did you mean item_id?"),
    (
        f"{ITEM}.id={{hash {{num_buckets: 9}}}}",
        f"{ITEM}: it is the item of the retriever, whose catalogue is a vocabulary",
    ),
    (
        f"{ITEM}.id.multi_valued=true",
        f"{ITEM}.id.multi_valued: it is the item of the retriever: an event has a single id",
    ),
    (f"{ITEM}.id.embedding_dim=32", f"{ITEM}.id.embedding_dim: 32 is given; items are compared with queries"),
    (f"{ITEM}.sides=[CANDIDATE]", f"{ITEM}.sides: it is the item of the retriever: HISTORY is needed"),
    (f"{ITEM}.sides=[HISTORY]", f"{ITEM}.sides: CANDIDATE is needed to evaluate on data.test"),
    (f"{ITEM}.sides=[USER, HISTORY, CANDIDATE]", f"{ITEM}.sides: USER features have no place", 2),
    (f"{ITEM}.sides=[HISTORY, CANDIDATE, ITEM]", f"{ITEM}.sides: it is the item of the retriever: ITEM", 2),
    (
        f"{ENCODER}={{own_embedding: false}}",
        f"{ENCODER}.own_embedding: false is given, and no feature has the side ITEM",
    ),
    (
        f"{ENCODER}={{residual: true}}",
        f"{ENCODER}.residual: it adds item features to the id embedding, so it needs a feature of side ITEM",
    ),
    (
        "model.retriever.loss={softmax {in_batch {num_uniform: -1}}}",
        "in_batch.num_uniform: -1 is given; it must be 0 or more",
    ),
    (
        "model.retriever.loss={softmax {frequency {power: -0.5}}}",
        "frequency.power: -0.5 is given; it must be 0 or more",
    ),
    (
        "model.retriever.preprocessor={contextual {}}",
        "preprocessor.contextual: does not fit a retriever; use uih",
    ),
    (
        f"{UIH}.positional.origin=END",
        f"{UIH}.positional.origin: END tells each position how many events follow",
    ),
    (
        f"{UIH}.positional.num_time_buckets=8",
        f"{UIH}.positional.num_time_buckets: the age at the request tells",
    ),
    (
        "model.retriever.mixer.sasrec.mask={contextual_reads_history: true}",
        "mask.contextual_reads_history: next-item",
    ),
    (
        "model.retriever.mixer.sasrec.layer_groups=[{mask {contextual_reads_history: true}}]",
        "layer_groups[0].mask.contextual_reads_history: next-item",
    ),
    (
        "model.retriever.mixer.sasrec.layer_groups=[{}, {tail_len: 20}]",
        "layer_groups[1].tail_len: next-item training makes every event a query: none can be left out",
    ),
    (
        "model.retriever.loss={focal {}}",
        "model.retriever.loss.focal: is a loss of binary; use one of softmax",
    ),
    (
        "model.retriever.loss={softmax {temperature: 0}}",
        "softmax.temperature: 0.0 is given; it must be above 0",
    ),
    ("model.retriever.metrics=[{auc {}}]", "model.retriever.metrics[0].auc: does not fit a retrieval task"),
    (
        "model.retriever.metrics=[{ndcg {}}, {ndcg {k: 10}}]",
        "metrics[1]: ndcg@10 is also model.retriever.metrics[0]",
    ),
    (
        "model.max_seq_len=49",
        "model.max_seq_len: 49 is given; data.max_history_len 50 need 50: raise it, or lower those",
    ),
    (
        "train.evaluation.patience=3",
        "train.evaluation.patience: there is nothing to evaluate on; set data.validation",
    ),
]


def _parts(rule):
    return (*rule, 1) if len(rule) == 2 else rule


@pytest.mark.parametrize(
    ("text", "override", "message", "count"),
    [(RANKER, *_parts(rule)) for rule in RANKER_RULES]
    + [(RETRIEVER, *_parts(rule)) for rule in RETRIEVER_RULES],
)
def test_a_rule_finds_what_it_is_for(tmp_path, text, override, message, count):
    loaded = load(text, [override], tmp_path)
    findings = config.check(loaded.pipeline, loaded.locations)
    assert any(message in finding for finding in findings), findings
    assert len(findings) == count, findings


def test_fp16_tables_are_not_averaged(tmp_path):
    overrides = ["model.embedding.table_precision=FP16", "train.weight_averaging={}"]
    (finding,) = config.check(load(RANKER, overrides, tmp_path).pipeline)
    assert finding.startswith("train.weight_averaging: an average of FP16 tables would lose small updates")


@pytest.mark.parametrize("negatives", ["full", "in_batch", "uniform"])
def test_rows_do_not_move_away_from_negatives_sampled_among_them(tmp_path, negatives):
    overrides = [f"model.retriever.loss={{softmax {{{negatives} {{}}}}}}", "train.balance_ranks=true"]
    findings = config.check(load(RETRIEVER, overrides, tmp_path).pipeline)
    expected = [] if negatives == "full" else ["train.balance_ranks: negatives are sampled from the rows"]
    assert [finding[: len(text)] for finding, text in zip(findings, expected, strict=True)] == expected


CONTEXTUAL = "model.ranker.preprocessor.contextual"
WITHOUT_USERS = ["features[2].sides=[HISTORY]", "features[3].sides=[HISTORY]"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{CONTEXTUAL}={{content_slice {{}}}}", f"{ITEM}.id.embedding_dim=8"],
            "content_slice: the features of an item are 16 wide and model.embedding_dim is 32; use",
        ),
        ([f"{CONTEXTUAL}.joined_contextual={{}}", *WITHOUT_USERS], "joined_contextual: it is made of USER"),
        (
            [f"{CONTEXTUAL}={{content_contextualized {{}}}}", *WITHOUT_USERS],
            "content_contextualized: it is made of USER features, but no feature has this side; remove it",
        ),
        (
            [f"{CONTEXTUAL}.action_placement=INTERLEAVED", "model.max_seq_len=46"],
            "model.max_seq_len: 46 is given; 2 contextual tokens, 2 x data.max_history_len 20 "
            "and 5 candidates need 47",
        ),
        (
            [f"{CONTEXTUAL}.joined_contextual.num_tokens=4", "model.max_seq_len=28"],
            "model.max_seq_len: 28 is given; 4 contextual tokens, data.max_history_len 20 and 5 candidates "
            "need 29",
        ),
    ],
)
def test_a_rule_of_preprocessors(tmp_path, overrides, message):
    loaded = load(RANKER, overrides, tmp_path)
    (finding,) = config.check(loaded.pipeline, loaded.locations)
    assert message in finding


def test_findings_carry_the_place_of_the_nearest_field(tmp_path):
    loaded = load(RANKER, [], tmp_path)
    loaded.pipeline.model.ranker.tasks[1].ClearField("loss")
    (finding,) = config.check(loaded.pipeline, loaded.locations)
    line = next(number for number, text in enumerate(RANKER.split("\n"), 1) if '"time"' in text)
    assert finding == f"{tmp_path}/x.config:{line}: model.ranker.tasks[1].loss: not set, but required"
    assert config.check(loaded.pipeline) == ["model.ranker.tasks[1].loss: not set, but required"]


def test_enum_values_that_only_code_can_set():
    pipeline = text_format.Parse(RANKER, pb.Pipeline())
    pipeline.model.precision = pb.PRECISION_UNSPECIFIED
    pipeline.features[0].sides.append(9)
    findings = config.check(pipeline)
    assert "model.precision: 0 is not one of its values; it must be one of FP32, BF16, FP16" in findings
    assert (
        "features[0].sides: 9 is not one of its values; it must be one of USER, HISTORY, CANDIDATE, ITEM"
        in findings
    )


def test_gauc_needs_users(tmp_path):
    overrides = [f"{TASK}.metrics=[{{gauc {{}}}}]", "data.key_columns="]
    (finding,) = config.check(load(RANKER, overrides, tmp_path).pipeline)
    assert finding.startswith(f"{TASK}.metrics[0].gauc: needs to know the user of a row")


def test_nothing_at_all_is_a_list_of_findings():
    findings = config.check(pb.Pipeline())
    for path in ("features", "data.train", "model", "train"):
        assert any(line.startswith(f"{path}: ") for line in findings)
