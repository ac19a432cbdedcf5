"""Settings without effect are warnings, and what a device cannot do is found."""

import pytest

from recsys import config
from recsys import protos as pb
from recsys.errors import ConfigError
from tests.config_texts import RANKER, RETRIEVER, load

TASK = "model.ranker.tasks[0]"
HSTU = "model.ranker.mixer.hstu"
CONTEXTUAL = "model.ranker.preprocessor.contextual"
ITEM = "features[0]"

WARNINGS = [
    (RANKER, ["train.accumulate_batches=2"], "train.accumulate_batches: applies to dense parameters only"),
    (RANKER, ["train.accumulate_batches=2", "model.embedding.placement=REPLICATED"], None),
    (
        RANKER,
        ["model.embedding.placement=REPLICATED", "train.sparse_optimizer={adam {}}"],
        "train.sparse_optimizer: without",
    ),
    (RANKER, ["model.ranker.mixer.hstu.mask={prefix: 3}"], "mask.prefix: without effect: there is no window"),
    (RANKER, ["model.ranker.mixer.hstu.mask={prefix: 3 window: 5}"], None),
    (RANKER, ["model.ranker.mixer.hstu.mask={target_window: true}"], "mask.target_window: without effect"),
    (
        RETRIEVER,
        ["model.retriever.mixer.sasrec.mask={target_group_size: 2}"],
        "mask.target_group_size: without effect",
    ),
    (RANKER, [f"{HSTU}.layer_groups=[{{tail_len: 19}}]"], None),
    (RANKER, [f"{HSTU}.layer_groups=[{{tail_len: 20}}]"], "layer_groups[0].tail_len: without effect"),
    (RANKER, [f"{CONTEXTUAL}.action_placement=INTERLEAVED", f"{HSTU}.layer_groups=[{{tail_len: 39}}]"], None),
    (
        RANKER,
        [
            f"{CONTEXTUAL}.action_placement=INTERLEAVED",
            f"{HSTU}.layer_groups=[{{tail_len: 20 tail_unit: EVENTS}}]",
        ],
        "layer_groups[0].tail_len: without effect",
    ),
    (RANKER, ["features[1].id.pooling=MEAN"], "features[1].id.pooling: without effect"),
    (RANKER, ["features[1].id.pooling=MEAN", "features[1].id.multi_valued=true"], None),
    (RANKER, [f"{ITEM}.id.vocabulary.unknown_rate=0"], f"{ITEM}.id.vocabulary.unknown_rate: 0 is given: the"),
    (RANKER, [f"{ITEM}.id.vocabulary.unknown_rate=1e-6"], None),
    (
        RETRIEVER,
        ["model.retriever.postprocessor={l2_norm {}}"],
        "model.retriever.postprocessor.l2_norm: without effect: l2_normalize",
    ),
    (
        RETRIEVER,
        ["model.retriever.postprocessor={l2_norm {}}", "model.retriever.l2_normalize=false"],
        None,
    ),
    (RANKER, ["train.num_steps=5"], "train.schedule.warmup_steps: 5 is given and the run has 5 steps"),
    (RANKER, ["train.num_steps=6"], None),
    (
        RANKER,
        ["train.num_steps=8", "train.weight_averaging={swa {start_step: 9}}"],
        "train.weight_averaging: without effect: swa.start_step is 9 and the run has 8 steps",
    ),
    (RANKER, ["train.num_steps=9", "train.weight_averaging={swa {start_step: 9}}"], None),
    (
        RANKER,
        ["train.num_steps=8", "train.weight_averaging={ema {every_steps: 9}}"],
        "train.weight_averaging: without effect: ema.every_steps is 9 and the run has 8 steps",
    ),
    (RANKER, ["train.num_steps=8", "train.weight_averaging={}"], None),
    (RANKER, ["predict.index={faiss {}}"], "predict.index: without effect: a ranker scores the candidates"),
    (RETRIEVER, ["predict.index={faiss {}}"], None),
    (
        RETRIEVER,
        ["model.retriever.preprocessor.uih.query_time=LAST_EVENT"],
        "uih.query_time: without effect: neither mixer nor postprocessor reads times",
    ),
    (
        RETRIEVER,
        [
            "model.retriever.preprocessor.uih.query_time=LAST_EVENT",
            "model.retriever.mixer={hstu {qk_dim: 4 bias {}}}",
        ],
        None,
    ),
    (
        RETRIEVER,
        ["model.retriever.seen=KEEP", "model.retriever.repeated_targets=LEAVE_OUT"],
        "model.retriever.repeated_targets: without effect: seen KEEP removes no target",
    ),
    (
        RETRIEVER,
        ["data.item_file=items.parquet"],
        "data.item_file: without effect: no feature has the side ITEM",
    ),
    (RANKER, ["train.num_epochs=1"], None),
    (
        RANKER,
        ["train.num_steps=8", "train.evaluation.every_steps=9"],
        "train.evaluation.every_steps: 9 is given and the run has 8 steps, so the model is evaluated",
    ),
    (RANKER, ["train.num_steps=8", "train.evaluation.every_steps=8"], None),
    (
        RANKER,
        [f"{TASK}.loss={{jrc {{pointwise_share: 0}}}}"],
        f"{TASK}.loss.jrc.pointwise_share: 0 is given: predictions order the candidates of a row",
    ),
    (
        RANKER,
        [f"{TASK}.loss={{pairwise {{}}}}", "data.max_candidates=1"],
        f"{TASK}.loss.pairwise: compares the candidates of a row, and data.max_candidates leaves one in each",
    ),
    (RANKER, [f"{TASK}.loss={{pairwise {{}}}}"], None),
    (RANKER, ["data.validation="], "data.validation: not set: the model will not be evaluated"),
]


@pytest.mark.parametrize(("text", "overrides", "message"), WARNINGS)
def test_settings_without_effect_are_warnings(tmp_path, text, overrides, message):
    loaded = load(text, overrides, tmp_path)
    assert config.check(loaded.pipeline) == []
    findings = config.warnings(loaded.pipeline, loaded.locations)
    assert len(findings) == (message is not None)
    assert message is None or message in findings[0]
    assert (
        config.warnings(config.resolve(loaded.pipeline, read_files=False).pipeline, loaded.locations)
        == findings
    )


@pytest.mark.parametrize("name", ["adam", "partial_row_wise_adam"])
def test_sparse_adam_needs_cuda(tmp_path, name):
    pipeline = load(RANKER, [f"train.sparse_optimizer={{{name} {{}}}}"], tmp_path).pipeline
    with pytest.raises(ConfigError, match=f"train.sparse_optimizer.{name}: FBGEMM has it on CUDA only"):
        config.check_device(pipeline, "cpu")
    config.check_device(pipeline, "cuda")
    pipeline.model.embedding.placement = pb.Embedding.REPLICATED
    config.check_device(pipeline, "cpu")
