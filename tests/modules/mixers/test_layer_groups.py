"""Masks and truncation by layer groups, against models that are dense, in float64, sample by sample.

Which tokens a group has is chosen by lists, who sees whom by the loops of the oracle, both from the spec.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from google.protobuf import text_format
from torch.fx.experimental import _config as symbolic
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config import registry
from recsys.modules.mixers import hstu
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout, offsets_from_lengths
from tests.modules.mixers.sequences import WIDTH, part, random_sequence
from tests.modules.mixers.test_sasrec import torch_layer
from tests.ops import oracle
from tests.ops.cases import layout_of, samples, times

# (history, targets): shorter than, as long as and longer than the tails; none; no targets; neither.
SHAPES = [(5, 3), (0, 2), (12, 2), (0, 0), (9, 0), (1, 4), (4, 1)]
GROUPS = {
    "masks": """layer_groups { num_layers: 1 mask { window: 3 prefix: 2 } }
        layer_groups { num_layers: 2 mask { window: 2 target_window: true target_group_size: 2 } }""",
    "tail": """layer_groups { num_layers: 2 mask { window: 3 prefix: 1 } }
        layer_groups { num_layers: 1 mask { contextual_reads_history: false } tail_len: 4 }""",
    "tails": """layer_groups { num_layers: 1 tail_len: 9 mask { window: 4 } }
        layer_groups { num_layers: 1 tail_len: 5 mask { window: 2 prefix: 1 target_window: true } }
        layer_groups { num_layers: 1 tail_len: 5 mask { target_group_size: 3 } }
        layer_groups { num_layers: 1 mask { window: 1 } }""",
    "nothing left": """layer_groups { num_layers: 1 } layer_groups { num_layers: 1 tail_len: 0 }""",
}
MIXERS = {
    "hstu": """hstu { num_heads: 2 qk_dim: 4 v_dim: 3 scale_len: 3
        bias { num_positions: 7 num_time_buckets: 40 } """,
    "sasrec": "sasrec { num_heads: 2 feed_forward_dim: 7 ",
}


MOST_KEPT = {"whole layers": 0.0, "only what goes on": 1.0}
"""Values of `hstu.MOST_KEPT` by what a layer of HSTU then computes when few of its tokens go on."""


def build(kind: str, groups: str):
    message = text_format.Parse(f"{MIXERS[kind]} {groups} }}", pb.Mixer())
    chosen = registry.pick(message)
    torch.manual_seed(0)
    module = chosen.cls(chosen.config, embedding_dim=WIDTH).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module


class Dense(NamedTuple):
    """One sample on its way through the layers."""

    shape: oracle.Sample
    rows: list[int]  # of the whole batch, those that are left
    x: torch.Tensor
    timestamps: torch.Tensor
    next_timestamps: torch.Tensor

    def keep(self, tail_len: int) -> "Dense":
        contextual, uih, targets = self.shape
        kept = [*range(contextual), *range(contextual + max(uih - tail_len, 0), self.shape.length)]
        columns = (column[kept] for column in (self.x, self.timestamps, self.next_timestamps))
        shape = oracle.Sample(contextual, min(uih, tail_len), targets)
        return Dense(shape, [self.rows[place] for place in kept], *columns)

    def mask(self, mask) -> torch.Tensor:
        length = self.shape.length
        return torch.tensor(oracle.table(self.shape, mask), dtype=torch.bool).view(length, length)


class RuleOfMask(NamedTuple):
    """A mask message as the oracle reads it."""

    window: int | None
    prefix: int
    target_window: bool
    target_group_size: int
    contextual_reads_history: bool


def dense_samples(sequence: JaggedSequence, shapes) -> list[Dense]:
    contextual, start, results = sequence.layout.num_contextual, 0, []
    for shape in samples(contextual, shapes):
        rows = list(range(start, start + shape.length))
        columns = (c[rows] for c in (sequence.values, sequence.timestamps, sequence.next_timestamps))
        results.append(Dense(shape, rows, *columns))
        start += shape.length
    return results


def through_groups(sample: Dense, groups: str, layer: Callable) -> Dense:
    """`layer(number, sample, mask)` returns the new x."""
    numbers = itertools.count()
    for group in text_format.Parse(groups, pb.HstuMixer()).layer_groups:
        if group.HasField("tail_len"):
            sample = sample.keep(group.tail_len)
        mask = RuleOfMask(
            group.mask.window if group.mask.HasField("window") else None,
            group.mask.prefix,
            group.mask.target_window,
            group.mask.target_group_size,
            group.mask.contextual_reads_history,
        )
        for _ in range(group.num_layers):
            sample = sample._replace(x=layer(next(numbers), sample, mask))
    return sample


def tails_behind(groups: str) -> list[int | None]:
    """The tail of the truncation right behind each layer."""
    results: list[int | None] = []
    for group in text_format.Parse(groups, pb.HstuMixer()).layer_groups:
        if results and group.HasField("tail_len"):
            results[-1] = group.tail_len
        results += [None] * group.num_layers
    return results


def dense_bias(tables, sample: Dense, group_size: int) -> torch.Tensor:
    """The bias of each pair of tokens: what the oracle finds in the tables for it."""
    length = sample.shape.length
    places = [oracle.place(sample.shape, token, group_size) for token in range(length)]
    pairs = list(itertools.product(range(length), repeat=2))
    distances = [max(0, min(places[i] - places[j], len(tables.position) - 1)) for i, j in pairs]
    ends, starts = sample.next_timestamps.tolist(), sample.timestamps.tolist()
    buckets = [oracle.bucket(ends[i] - starts[j], len(tables.time)) for i, j in pairs]
    return (tables.position[distances] + tables.time[buckets]).view(length, length)


def dense_hstu(mixer, sample: Dense, groups: str) -> Dense:
    heads, key, value, scale_len = 2, 4, 3, 3.0

    def layer(number, sample, mask):
        weights, tables = mixer.layers[number], mixer.biases[number]
        normed = F.layer_norm(sample.x, [WIDTH], weights.input_norm.weight, weights.input_norm.bias, 1e-6)
        joined = normed @ weights.uvqk.weight.T + weights.uvqk.bias
        u, v, q, k = joined.split([heads * value, heads * value, heads * key, heads * key], dim=1)
        sees, bias, attended = sample.mask(mask), dense_bias(tables, sample, mask.target_group_size), []
        for head in range(heads):
            q_head, k_head = (part[:, head * key : (head + 1) * key] for part in (q, k))
            scores = q_head @ k_head.T / key**0.5 + bias
            attended.append(F.silu(scores) * sees / scale_len @ v[:, head * value : (head + 1) * value])
        a = torch.cat(attended, dim=1)
        gated = F.silu(u) * F.layer_norm(a, a.shape[1:], weights.norm.weight, weights.norm.bias, 1e-6)
        return sample.x + torch.cat([F.silu(u), a, gated], dim=1) @ weights.output.weight.T

    return through_groups(sample, groups, layer)


def dense_sasrec(mixer, sample: Dense, groups: str) -> Dense:
    def layer(number, sample, mask):
        if sample.shape.length == 0:
            return sample.x
        theirs = torch_layer(mixer.blocks[number], heads=2)
        return theirs(sample.x[None], src_mask=~sample.mask(mask))[0]

    sample = through_groups(sample, groups, layer)
    return sample._replace(x=F.layer_norm(sample.x, [WIDTH], mixer.norm.weight, mixer.norm.bias, 1e-6))


DENSE = {"hstu": dense_hstu, "sasrec": dense_sasrec}


WITH_GROUPS = [
    name
    for name, mixer in registry.registered(pb.Mixer).items()
    if "layer_groups" in mixer.config.DESCRIPTOR.fields_by_name
]


@pytest.fixture(
    params=[(name, way) for name in WITH_GROUPS for way in (MOST_KEPT if name == "hstu" else [""])], ids=str
)
def kind(request, monkeypatch):
    """A mixer, and how its layers compute, if there are several ways."""
    name, way = request.param
    assert name in DENSE, f"write a dense {name}"
    if way:
        monkeypatch.setattr(hstu, "MOST_KEPT", MOST_KEPT[way])
    return name


@pytest.mark.parametrize("contextual", [0, 3])
@pytest.mark.parametrize("groups", GROUPS)
def test_equals_a_dense_model_of_each_sample(kind, groups, contextual):
    mixer, sequence = build(kind, GROUPS[groups]), random_sequence(SHAPES, contextual=contextual)
    with torch.no_grad():
        mixed = mixer(sequence)
        expected = [DENSE[kind](mixer, sample, GROUPS[groups]) for sample in dense_samples(sequence, SHAPES)]
    torch.testing.assert_close(mixed.values, torch.cat([sample.x for sample in expected]))
    rows = [row for sample in expected for row in sample.rows]
    assert torch.equal(mixed.timestamps, sequence.timestamps[rows])
    assert torch.equal(mixed.next_timestamps, sequence.next_timestamps[rows])
    layout = mixed.layout
    assert layout.lengths.tolist() == [sample.shape.length for sample in expected]
    assert layout.num_uih.tolist() == [sample.shape.uih for sample in expected]
    assert layout.num_targets.tolist() == [sample.shape.targets for sample in expected]
    assert (layout.total_len, layout.num_contextual) == (len(rows), contextual)
    assert layout.max_len == max(sample.shape.length for sample in expected)
    targets = [sample.x[sample.shape.contextual + sample.shape.uih :] for sample in expected]
    torch.testing.assert_close(mixed.targets(), torch.cat(targets))


@pytest.mark.parametrize("way", MOST_KEPT)
@pytest.mark.parametrize("groups", GROUPS)
def test_gradients_are_those_of_the_dense_model(groups, way, monkeypatch):
    monkeypatch.setattr(hstu, "MOST_KEPT", MOST_KEPT[way])
    mixer, sequence = build("hstu", GROUPS[groups]), random_sequence(SHAPES, contextual=1)
    values = sequence.values.requires_grad_()
    expected = torch.cat(
        [dense_hstu(mixer, sample, GROUPS[groups]).x for sample in dense_samples(sequence, SHAPES)]
    )
    cotangent = torch.randn_like(expected)
    wanted = [values, *mixer.parameters()]
    actual = torch.autograd.grad(mixer(sequence).values, wanted, cotangent, allow_unused=True)
    reference = torch.autograd.grad(expected, wanted, cotangent, allow_unused=True)
    for got, want in zip(actual, reference, strict=True):
        got, want = (torch.zeros(1) if grad is None else grad for grad in (got, want))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("groups", GROUPS)
def test_a_sample_is_mixed_alike_alone_and_in_a_batch(kind, groups):
    mixer, sequence = build(kind, GROUPS[groups]), random_sequence(SHAPES)
    mixed = mixer(sequence)
    together = mixed.values.split(mixed.layout.lengths.tolist())
    for number, expected in enumerate(together):
        torch.testing.assert_close(mixer(part(sequence, SHAPES, number)).values, expected)


PLAIN = "layer_groups { num_layers: 1 } layer_groups { num_layers: 1 "
FEATURES = {
    "window": PLAIN + "mask { window: 2 } }",
    "prefix": (PLAIN + "mask { window: 2 } }", PLAIN + "mask { window: 2 prefix: 2 } }"),
    "target window": (PLAIN + "mask { window: 2 } }", PLAIN + "mask { window: 2 target_window: true } }"),
    "target groups": PLAIN + "mask { target_group_size: 2 } }",
    "contextual": PLAIN + "mask { contextual_reads_history: false } }",
    "tail": PLAIN + "tail_len: 3 }",
    "tail length": (PLAIN + "tail_len: 4 }", PLAIN + "tail_len: 3 }"),
    "prefix of what is left": (
        PLAIN + "tail_len: 4 mask { window: 1 target_window: true } }",
        PLAIN + "tail_len: 4 mask { window: 1 target_window: true prefix: 1 } }",
    ),
    "layers": PLAIN.replace("num_layers: 1 }", "num_layers: 2 }", 1) + "}",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_each_setting_changes_what_comes_out(kind, feature):
    off, on = FEATURES[feature] if isinstance(FEATURES[feature], tuple) else (PLAIN + "}", FEATURES[feature])
    sequence = random_sequence([(6, 3)])
    before, after = (build(kind, groups)(sequence) for groups in (off, on))
    if feature == "contextual":
        contextual = [mixed.values[: mixed.layout.num_contextual] for mixed in (before, after)]
        assert not torch.isclose(*contextual).any()
    elif feature in ("window", "prefix"):  # a row of events, since targets see all
        assert not torch.isclose(before.history(), after.history()).all()
    else:
        assert not torch.isclose(before.targets(), after.targets()).all()


def test_what_a_truncation_leaves_out_counts_up_to_it(kind):
    """Events before the tail change the targets through the layers in front of the truncation only."""
    sequence = random_sequence([(8, 2)])
    values = sequence.values.clone()
    values[2:5, 0] += 1  # the first three of eight events; the tail is four
    changed = sequence.with_values(values)
    front = build(kind, "layer_groups { num_layers: 2 tail_len: 4 }")
    torch.testing.assert_close(front(changed).values, front(sequence).values, rtol=0, atol=0)
    behind = build(kind, "layer_groups { num_layers: 1 } layer_groups { num_layers: 1 tail_len: 4 }")
    assert not torch.isclose(behind(changed).targets(), behind(sequence).targets()).any()


def test_history_does_not_see_later_events_or_targets(kind):
    mask = "mask { window: 3 prefix: 1 contextual_reads_history: false }"
    groups = f"layer_groups {{ num_layers: 2 {mask} }} layer_groups {{ num_layers: 2 tail_len: 5 {mask} }}"
    mixer, sequence = build(kind, groups), random_sequence([(8, 3)])
    before = mixer(sequence).values
    # 2 contextual tokens, events 3 to 7 of 0 to 7, 3 targets.
    rows = [0, 1, *range(5, 13)]
    for cut in range(3, 10):
        values, timestamps = sequence.values.clone(), sequence.timestamps.clone()
        values[cut:] += torch.randn(len(values) - cut, WIDTH, dtype=values.dtype)
        timestamps[cut:] += 1000
        after = mixer(dataclasses.replace(sequence, values=values, timestamps=timestamps)).values
        earlier = torch.tensor([row < cut for row in rows])
        torch.testing.assert_close(after[earlier], before[earlier], rtol=0, atol=0)
        assert not torch.isclose(after[~earlier], before[~earlier]).all(1).any()


@pytest.mark.parametrize("contextual", [0, 3])
@pytest.mark.parametrize("groups", GROUPS)
def test_flops_are_those_of_the_tokens_and_pairs_that_are_needed(kind, groups, contextual):
    """Tokens that do not go on behind a layer are looked at in it and do not look themselves."""
    mixer, sequence = build(kind, GROUPS[groups]), random_sequence(SHAPES, contextual=contextual)
    # Of each layer: its weights for a token; its keys and values for a pair.
    if kind == "hstu":
        weights, width = WIDTH * (2 * 2 * 3 + 2 * 2 * 4) + 3 * 2 * 3 * WIDTH, 2 * (4 + 3)
    else:
        weights, width = WIDTH * (3 * WIDTH + WIDTH + 2 * 7), 2 * WIDTH
    tails = tails_behind(GROUPS[groups])
    flops = 0

    def count(number, sample, mask):
        nonlocal flops
        contextual, uih, targets = sample.shape
        older = 0 if tails[number] is None else max(uih - tails[number], 0)
        visible = sample.mask(mask)
        visible[contextual : contextual + older] = False
        looking = (sample.shape.length - older) * weights + older * WIDTH * width
        flops += 2 * (looking + int(visible.sum()) * width)
        return sample.x

    for sample in dense_samples(sequence, SHAPES):
        through_groups(sample, GROUPS[groups], count)
    assert mixer.flops(sequence.layout) == flops


def test_nothing_waits_for_the_device(kind):
    """A device that holds no numbers: whatever read one would fail."""
    layout = layout_of(samples(2, SHAPES)).to("meta")
    columns = [torch.empty(layout.total_len, dtype=torch.int64, device="meta") for _ in range(2)]
    values = torch.empty(layout.total_len, WIDTH, device="meta", requires_grad=True)
    mixer = build(kind, GROUPS["tails"]).float().to("meta").train()
    mixed = mixer(JaggedSequence(values, layout, *columns))
    mixed.values.sum().backward()
    lengths = [2 + min(uih, 5) + targets for uih, targets in SHAPES]
    assert mixed.values.shape == (sum(lengths), WIDTH)
    assert mixer.flops(layout) > 0


def test_no_tokens_at_all(kind):
    sequence = random_sequence([(0, 0), (0, 0)], contextual=0)
    mixed = build(kind, GROUPS["tails"])(sequence)
    assert mixed.values.shape == (0, WIDTH) and mixed.layout.lengths.tolist() == [0, 0]


class Scorer(torch.nn.Module):
    """Targets of a mixer from flat tensors; `carrier` [max_len] holds no numbers."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, values, lengths, num_targets, timestamps, next_timestamps, targets, carrier):
        layout = layout_in_graph(lengths, num_targets, values, targets, carrier)
        return self.mixer(JaggedSequence(values, layout, timestamps, next_timestamps)).targets()


def layout_in_graph(lengths, num_targets, values, targets, carrier):
    return SequenceLayout.trusted(
        lengths,
        offsets_from_lengths(lengths),
        num_targets,
        2,
        total_len=values.shape[0],
        max_len=carrier.shape[0],
        total_targets=targets.shape[0],
    )


def graph_inputs(shapes, seed):
    layout = layout_of(samples(2, shapes))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.total_len, WIDTH, generator=generator)
    sizes = (torch.empty(layout.total_targets), torch.empty(layout.max_len))
    return (values, layout.lengths, layout.num_targets, *times(layout.total_len, seed), *sizes)


@pytest.mark.parametrize("kind", ["hstu", pytest.param("sasrec", marks=pytest.mark.slow)])
def test_an_exported_graph_serves_all_sizes(kind):
    """Captured with gradients; `scoring/test_signature.py` captures such stacks without.

    Tokens are left out in front of the first layer and behind it.
    """
    groups = """layer_groups { num_layers: 1 tail_len: 9 mask { window: 4 target_group_size: 3 } }
        layer_groups { num_layers: 1 tail_len: 5 mask { window: 2 prefix: 1 target_window: true } }"""
    settings = "recompute: [NORMED_X, UVQK, GATED] stochastic_depth: 0.5" if kind == "hstu" else ""
    model = Scorer(build(kind, f"{settings} {groups}").float())
    example = graph_inputs([(7, 2), (12, 3), (0, 4)], seed=0)
    dynamic = tuple({0: torch.export.Dim.AUTO} for _ in example)
    with symbolic.patch(backed_size_oblivious=True):
        program = torch.export.export(model, example, dynamic_shapes=dynamic)
    graph = program.module()
    for seed, shapes in enumerate(([(3, 1)], SHAPES, [(30, 5)] * 4, [(0, 0), (0, 1)], [(2, 0)] * 3)):
        inputs = graph_inputs(shapes, seed)
        sequence = JaggedSequence(inputs[0], layout_of(samples(2, shapes)), *inputs[3:5])
        with torch.no_grad():
            torch.testing.assert_close(graph(*inputs), model.mixer(sequence).targets(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("layer_groups {} num_layers: 2", "give layer_groups, or num_layers and mask, not both"),
        ("layer_groups {} mask {}", "give layer_groups, or num_layers and mask, not both"),
        ("layer_groups { tail_len: 2 tail_unit: EVENTS }", r"layer_groups\[0\] is in events: resolve"),
        ("layer_groups { mask { window: 2 unit: EVENTS } }", "window and prefix are in events: resolve"),
        (
            "layer_groups { tail_len: 5 } layer_groups {} layer_groups { tail_len: 6 }",
            r"tail_len 6 of layer_groups\[2\] is more than the 5 tokens that an earlier group leaves",
        ),
    ],
)
def test_stacks_that_cannot_be_are_refused(kind, groups, message):
    with pytest.raises(ValueError, match=message):
        build(kind, groups)


@pytest.mark.parametrize(
    "simple", ["num_layers: 3 mask { window: 2 prefix: 1 }", "mask { window: 2 prefix: 1 }"]
)
def test_the_simple_form_is_one_group(kind, simple):
    layers = 3 if "num_layers" in simple else 2
    group = f"layer_groups {{ num_layers: {layers} mask {{ window: 2 prefix: 1 }} }}"
    sequence = random_sequence(SHAPES)
    torch.testing.assert_close(
        build(kind, simple)(sequence).values, build(kind, group)(sequence).values, rtol=0, atol=0
    )
