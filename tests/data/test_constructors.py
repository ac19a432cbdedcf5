"""Constructors of the data path take values and open no file; their class methods `open` read."""

import shutil

import numpy as np
import pytest

from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.data.collator import Collator
from recsys.data.convert.converter import Converter
from recsys.data.convert.item_catalogue import ItemCatalogue
from recsys.data.counts import RowCounter
from recsys.data.loader import Loader
from recsys.data.negatives import FrequencySampler, InBatchLogQ, NegativeSampler
from recsys.data.plan.epoch import PlanSettings
from recsys.data.schema.vocabulary import mappings
from recsys.data.sources import CsvSource, ParquetSource, SyntheticSource
from recsys.data.unknown_ids import UnknownIds
from recsys.data.workers.reader import CheckedSource, Reader
from recsys.errors import DataError

RULE = LayoutRule(num_contextual=2)


def test_constructors_work_where_no_file_is(sample):
    sample.write(sample.rows(9))
    pipeline = sample.pipeline
    opened = Loader.open(pipeline, "train", RULE)
    table_mappings, columns = mappings(pipeline), opened.source.check(pipeline, "train")
    shutil.rmtree(sample.folder)
    with pytest.raises(DataError):
        Loader.open(pipeline, "train", RULE)

    Converter(pipeline, RULE, table_mappings, mode="train")
    CsvSource(pb.CsvSource(paths=["none.csv"]), {}, [])
    SyntheticSource(pb.SyntheticSource(num_rows=3), pipeline)
    ItemCatalogue({})
    NegativeSampler(7, seed=1, num_drawn=3, frequencies=FrequencySampler(np.ones(7), 0.5, 3))
    InBatchLogQ(np.ones(7), 3)
    reader = Reader(
        pipeline,
        CheckedSource(ParquetSource(opened.source.files), columns),
        PlanSettings(pipeline.data.batch_size, pipeline.data.num_lanes),
        "train",
        rule=RULE,
        num_readers=1,
        num_slots=1,
    )
    collator = Collator(pipeline, RULE, negatives=None)
    loader = Loader(reader, collator, RowCounter("train", by_epoch=True), UnknownIds(pipeline))
    # Two row groups of 5 and 4 rows in two lanes, 4 rows a batch.
    assert loader.num_batches() == 3
    with pytest.raises(DataError):
        next(loader.epoch())
