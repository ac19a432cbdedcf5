"""A mixture against its stacks, each run alone on its own channel."""

import pytest
import torch
from google.protobuf import text_format

from recsys import protos as pb
from recsys.modules.mixers import MixtureMixer
from recsys.modules.sequence import join
from recsys.ops import SequenceLayout
from tests.modules.mixers.sequences import WIDTH, random_sequence

# Histories differ from channel to channel, candidates do not.
CHANNELS = (
    [(5, 3), (0, 2), (0, 0), (6, 0), (1, 4)],
    [(2, 3), (7, 2), (0, 0), (0, 0), (3, 4)],
    [(0, 3), (1, 2), (4, 0), (2, 0), (0, 4)],
)
PLAIN = "num_heads: 2 qk_dim: 4 v_dim: 3 scale_len: 3"
GROUPS = (
    f"{PLAIN} layer_groups {{ num_layers: 1 mask {{ window: 2 prefix: 1 }} }} layer_groups {{ tail_len: 3 }}"
)
BIASED = f"{PLAIN} num_layers: 2 bias {{ num_positions: 20 num_time_buckets: 40 }}"
REBUILT = f"{PLAIN} num_layers: 2 recompute: [UVQK, GATED]"
OTHER = "num_heads: 1 qk_dim: 5 v_dim: 5 scale_len: 4 num_layers: 1"
MIXTURES = {
    "equal": ([PLAIN + " num_layers: 2"] * 3, [[0, 1, 2]]),
    "equal groups": ([GROUPS] * 3, [[0, 1, 2]]),
    "one other": ([GROUPS, OTHER, GROUPS], [[0, 2], [1]]),
    "tables of their own": ([BIASED] * 3, [[0], [1], [2]]),
    "recomputed": ([REBUILT] * 3, [[0], [1], [2]]),
    "recomputed in step": ([PLAIN + " num_layers: 2 recompute: [NORMED_X, GATED]"] * 3, [[0, 1, 2]]),
}


def build(stacks: list[str]) -> MixtureMixer:
    text = "".join(f"stacks {{ channel: 'c{n}' hstu {{ {stack} }} }}" for n, stack in enumerate(stacks))
    torch.manual_seed(0)
    mixer = MixtureMixer(text_format.Parse(text, pb.MixtureMixer()), embedding_dim=WIDTH).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return mixer


def sequences():
    return [random_sequence(shapes, seed=n) for n, shapes in enumerate(CHANNELS)]


@pytest.fixture(params=MIXTURES)
def case(request):
    return MIXTURES[request.param]


def test_equals_its_stacks_one_by_one(case):
    stacks, together = case
    mixer, parts = build(stacks), sequences()
    assert mixer.together == together
    mixed = mixer(join(parts))
    alone = [stack(part).targets() for stack, part in zip(mixer.stacks, parts, strict=True)]
    expected = torch.cat(alone, dim=1) @ mixer.fuse.weight.T + mixer.fuse.bias
    torch.testing.assert_close(mixed.values, expected)
    assert mixed.layout.lengths.tolist() == mixed.layout.num_targets.tolist() == [3, 2, 0, 0, 4]
    torch.testing.assert_close(mixed.targets(), mixed.values)
    for name in ("timestamps", "next_timestamps"):
        assert torch.equal(getattr(mixed, name), getattr(parts[0], name)[parts[0].layout.kinds() == 2])

    cotangent = torch.randn_like(expected)
    weights = list(mixer.parameters())
    actual = torch.autograd.grad((mixed.values * cotangent).sum(), weights)
    for got, wanted in zip(actual, torch.autograd.grad((expected * cotangent).sum(), weights), strict=True):
        torch.testing.assert_close(got, wanted)
        assert got.any()


def test_stacks_in_step_attend_once_a_layer():
    mixer = build([PLAIN + " num_layers: 2"] * 3)
    calls = []
    first = mixer.stacks[0]
    attention = first.attention

    def count(*args, **kwargs):
        calls.append(kwargs["layout"].batch_size)
        return attention(*args, **kwargs)

    for stack in mixer.stacks:
        stack.attention = count
    mixer(join(sequences()))
    assert calls == [15, 15]


def test_a_channel_reaches_the_targets_only_through_its_stack():
    mixer, parts = build([GROUPS] * 3), sequences()
    before = mixer(join(parts)).values
    parts[1] = parts[1].with_values(parts[1].values + torch.randn_like(parts[1].values))
    with torch.no_grad():
        mixer.fuse.weight[:, WIDTH : 2 * WIDTH] = 0
    unmoved = mixer(join(parts)).values
    parts[1] = sequences()[1]
    torch.testing.assert_close(unmoved, mixer(join(parts)).values)
    assert (unmoved - before).norm() > 1e-3


def test_dropout_and_depth_are_for_training():
    mixer = build([PLAIN + " num_layers: 3 dropout: 0.4 input_dropout: 0.1 stochastic_depth: 0.5"] * 3)
    joined = join(sequences())
    assert mixer.together == [[0, 1, 2]]
    assert not torch.equal(mixer(joined).values, mixer(joined).values)
    mixer.eval()
    assert torch.equal(mixer(joined).values, mixer(joined).values)


def test_flops_add_up():
    mixer, parts = build([GROUPS, OTHER, GROUPS]), sequences()
    stacks = sum(stack.flops(part.layout) for stack, part in zip(mixer.stacks, parts, strict=True))
    targets = sum(targets for _, targets in CHANNELS[0])
    assert mixer.flops(join(parts).layout) == stacks + 2 * targets * 3 * WIDTH * WIDTH


def test_joined_layouts_know_their_parts():
    layouts = [item.layout for item in sequences()]
    joined = SequenceLayout.join(layouts)
    assert joined.lengths.tolist() == sum((item.lengths.tolist() for item in layouts), [])
    assert joined.total_len == sum(item.total_len for item in layouts)
    assert joined.max_len == max(item.max_len for item in layouts)
    layout, index = joined.truncate(2)
    start, expected = 0, []
    for item, part in zip(layouts, layout.parts, strict=True):
        truncated = item.truncate(2)
        assert part.lengths.tolist() == truncated.layout.lengths.tolist()
        expected += (truncated.index + start).tolist()
        start += item.total_len
    assert index.tolist() == expected
    assert [part.total_len for part in joined.to("cpu").parts] == [item.total_len for item in layouts]
    with pytest.raises(ValueError, match="num_contextual"):
        SequenceLayout.join([layouts[0], SequenceLayout(torch.tensor([3]))])
    with pytest.raises(ValueError, match="no part"):
        SequenceLayout.join([])


def test_an_empty_mixture_is_refused():
    with pytest.raises(ValueError, match="stacks: none is given"):
        MixtureMixer(pb.MixtureMixer(), embedding_dim=4)
