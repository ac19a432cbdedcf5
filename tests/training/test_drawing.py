"""Drawings of samples, mark by mark, against mask tables written by hand."""

import torch

from recsys.models import build_model
from recsys.training.drawing import draw_stages
from tests.modules.pipelines import CHANNELS, RANKER, RETRIEVER, batch_of, pipeline_of, random_rows

STACK = """model { ranker { mixer { hstu {
  layer_groups { num_layers: 2  mask { window: 2  prefix: 1 } }
  layer_groups { num_layers: 1  tail_len: 3  mask { target_group_size: 2 } }
} } } }"""


def drawing(sizes, row, *texts):
    pipeline = pipeline_of(*texts)
    torch.manual_seed(0)
    return draw_stages(build_model(pipeline).mix, batch_of(pipeline, random_rows(pipeline, sizes)), row)


def test_every_stage_of_a_sample():
    assert drawing([(2, 1), (5, 2)], 1, RANKER, STACK).splitlines() == [
        "sequence: 2 contextual, 5 history, 2 target tokens",
        "  layers 1 to 2: window 2, prefix 1",
        "       0    0  contextual  #######..",
        "       1    1  contextual  #######..",
        "       2    2  history     ###......",
        "       3    3  history     ####.....",
        "       4    4  history     #####....",
        "       5    5  history     ###.##...",
        "       6    6  history     ###..##..",
        "       7    7  target      ########.",
        "       8    8  target      #######.#",
        "  attention truncation to 3 history tokens: 2 tokens are dropped",
        "  layer 3: full causal attention, targets in groups of 2",
        "       0    0  contextual  #####..",
        "       1    1  contextual  #####..",
        "       2    4  history     ###....",
        "       3    5  history     ####...",
        "       4    6  history     #####..",
        "       5    7  target      ######.",
        "       6    8  target      #######",
        "  to the head: 2 targets",
    ]


def test_the_middle_of_a_long_history_is_left_out():
    lines = drawing([(30, 1)], 0, RETRIEVER, "data { max_history_len: 30 }").splitlines()
    assert lines[0] == "sequence: 0 contextual, 30 history, 0 target tokens"
    assert lines[10] == "          ..."
    assert lines[9] == "       7    7  history     ######## ........"
    assert lines[-2] == "      29   29  history     ######## ########"
    assert lines[-1] == "  to the comparison with items: 30 query tokens"
    assert len(lines) == 2 + 8 + 1 + 8 + 1


def test_each_channel_is_drawn():
    text = drawing([(6, 2)], 0, RANKER, CHANNELS)
    starts = [line for line in text.splitlines() if not line.startswith(" ")]
    assert [line.partition(":")[0] for line in starts] == [
        "channel click",
        "channel like or long",
        "channel all",
    ]
    assert starts[2] == "channel all: 2 contextual, 6 history, 2 target tokens"
    assert text.count("to the head: 2 targets") == 3
