"""Ranking configs as combinations: axes, their values, and the config of each combination."""

import itertools
import random
from collections.abc import Iterator

from recsys import protos as pb
from tests.oracle.models import written

DATA = """
data { max_history_len: 9  max_candidates: 4 }
features { name: "item_id"  sides: [HISTORY, CANDIDATE]  id { vocabulary { size: 20 } } }
features {
  name: "tags"  sides: [HISTORY, CANDIDATE]
  id { hash { num_buckets: 7 }  embedding_dim: 4  multi_valued: true  pooling: MEAN }
}
features { name: "price"  sides: CANDIDATE  numeric { normalize {} } }
model {
  embedding_dim: 8
  ranker {
    head { fusion { mlp { hidden: 8 } } }
    tasks { name: "click"  loss { binary_cross_entropy {} } }
    tasks { name: "stars"  loss { mean_squared_error {} } }
  }
}
"""
ACTION = """action {
    bits { name: "click"  bit: 0 }  bits { name: "like"  bit: 3 }  watch_time_thresholds: [3, 10]
}"""

SIZES = {
    "targets": [(9, 3), (0, 2), (4, 0), (1, 1), (0, 0), (7, 4)],
    "no targets": [(5, 0), (0, 0)],
}
"""(Events, candidates) of the rows of a batch."""

AXES = {
    "contextual": {
        "0 contextual": "",
        "3 contextual": """
            features { name: "gender"  sides: USER  id { vocabulary { size: 3 }  embedding_dim: 4 } }
            features { name: "age"  sides: USER  numeric { normalize {} } }
            features { name: "city"  sides: USER  id { hash { num_buckets: 5 } } }""",
    },
    "mask": {
        "no window": "",
        "window": "window: 2",
        "window and prefix": "window: 2  prefix: 1",
        "target window": "window: 2  prefix: 1  target_window: true",
    },
    "truncation": {
        "no truncation": None,
        "tail in tokens": "tail_len: 5",
        "tail in events": "tail_len: 3  tail_unit: EVENTS",
    },
    "placement": {
        "summed": "action_placement: SUMMED",
        "interleaved": "action_placement: INTERLEAVED",
    },
    "channels": {"1 channel": 0, "2 channels": 2},
    "bias": {"no bias": "", "bias": "bias { num_time_buckets: 40 }"},
}
"""Axes whose full product is tested."""

FURTHER = {
    "form": {
        "production": "",
        "research": "activation: UVQK  gate: UGN",
        "grouped": "norm: GROUP_NORM  activation: UVQK",
    },
    "stacks": {"alike": "num_heads: 2  qk_dim: 4  v_dim: 3", "different": "num_heads: 1  qk_dim: 5"},
    "scale": {"scale": "scale_len: 3", "scale of the model": ""},
    "biases": {
        "shared": "bias { num_time_buckets: 40 }",
        "per head": "bias { num_time_buckets: 40  per_head: true  num_positions: 4 }",
        "positions only": "bias { num_time_buckets: 0 }",
    },
    "unit": {"mask in tokens": "", "mask in events": "unit: EVENTS"},
    "groups": {"single targets": "", "groups of 2": "target_group_size: 2"},
    "reads": {"contextual reads": "", "contextual reads not": "contextual_reads_history: false"},
    "positional": {
        "from the end": "positional { num_time_buckets: 8 }",
        "from the start": "positional { origin: START num_time_buckets: 6 time_scale: LOG time_unit: 2.5 }",
        "from the start, without ages": "positional { origin: START  num_positions: 7 }",
        "short table": "positional { num_positions: 4 }",
        "no positions": "",
    },
    "postprocessor": {
        "layer norm": "postprocessor { layer_norm {} }",
        "length 1": "postprocessor { l2_norm {} }",
        "as it is": "",
    },
}
"""Further axes: each combination of the product gets one value of each of them."""

CHANNELS = """channels { name: "click"  bits: 0  max_events: 3 }
    channels { name: "like or long"  bits: 3  min_watch_time: 8 }"""

Combination = dict[str, str]
"""Axis -> name of its value."""


def product() -> list[Combination]:
    """All combinations of `AXES`, each with values of `FURTHER` drawn from a seed."""
    draw = random.Random(4)
    results = []
    for names in itertools.product(*AXES.values()):
        combination = dict(zip(AXES, names, strict=True))
        results.append(combination | {axis: draw.choice(list(values)) for axis, values in FURTHER.items()})
    return results


def covering(combinations: list[Combination], strength: int) -> list[Combination]:
    """Some of them, in which every `strength` values of different axes of `AXES` come together, and every
    two of any axes."""

    def parts(combination: Combination) -> Iterator[tuple[tuple[str, str], ...]]:
        yield from itertools.combinations([item for item in combination.items() if item[0] in AXES], strength)
        yield from itertools.combinations(combination.items(), 2)

    missing = {part for combination in combinations for part in parts(combination)}
    left, chosen = list(combinations), []
    while missing:
        best = max(left, key=lambda combination: len(missing.intersection(parts(combination))))
        left.remove(best)
        chosen.append(best)
        missing.difference_update(parts(best))
    return chosen


def name(combination: Combination) -> str:
    return ", ".join(combination[axis] for axis in AXES)


def pipeline(combination: Combination) -> pb.Pipeline:
    """The config of a combination as a user would write it."""
    text = {axis: (AXES | FURTHER)[axis][value] for axis, value in combination.items()}
    bias = text["biases"] if text["bias"] else ""
    mask = " ".join(text[axis] for axis in ("mask", "groups", "reads"))
    mask = f"mask {{ {mask} {text['unit'] if text['mask'] else ''} }}"
    layers = f"num_layers: 2  {mask}"
    if text["truncation"]:
        tail = text["truncation"]
        layers = f"layer_groups {{ num_layers: 1 {mask} }} layer_groups {{ num_layers: 1 {mask} {tail} }}"
    form = f"{text['form']} {text['scale']} {bias} {layers}"
    alike = FURTHER["stacks"]["alike"]
    mixer, channels = f"hstu {{ {alike} {form} }}", ""
    if text["channels"]:
        channels = CHANNELS
        stacks = zip(("click", "like or long"), (alike, text["stacks"]), strict=True)
        stacks = [
            f"stacks {{ channel: '{channel}'  hstu {{ {settings} {form} }} }}" for channel, settings in stacks
        ]
        mixer = f"mixture {{ {' '.join(stacks)} }}"
    preprocessor = f"content {{ hidden: 16 }} {ACTION} {text['placement']} {text['positional']} {channels}"
    return written(
        DATA,
        text["contextual"],
        f"""model {{ ranker {{
            preprocessor {{ contextual {{ {preprocessor} }} }}  mixer {{ {mixer} }}  {text["postprocessor"]}
        }} }}""",
    )
