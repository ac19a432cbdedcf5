"""Rotary positions against explicit rotations of every pair of tokens, in exact angles."""

import cmath
import math
from fractions import Fraction

import pytest
import torch
from google.protobuf import text_format
from torch import nn

from recsys import protos as pb
from recsys.modules.mixers import SasRecMixer
from recsys.modules.mixers.rotary import RotaryPositions
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout
from recsys.ops.jagged.mask import dense_mask
from tests.modules.mixers.sequences import WIDTH, random_sequence

SHAPES = [(5, 3), (0, 2), (0, 0), (6, 0)]
TIMED = "longest_seconds: 100000000"
FORMS = {"places": "longest_seconds: 0", "places and times": TIMED}
ROTARY = "shortest_tokens: 3 longest_tokens: 40 shortest_seconds: 7"


def build(form: str, rest: str, heads: int, width: int) -> SasRecMixer:
    text = f"num_heads: {heads} feed_forward_dim: 7 rotary {{ {ROTARY} {FORMS[form]} }} {rest}"
    torch.manual_seed(0)
    mixer = SasRecMixer(text_format.Parse(text, pb.SasRecMixer()), embedding_dim=width).double().eval()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer


def wide(sequence: JaggedSequence, width: int) -> JaggedSequence:
    """The sequence with tokens of another width."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(sequence.layout.total_len, width, generator=generator, dtype=torch.float64)
    return sequence.with_values(values)


def waves(shortest: int, longest: int, count: int) -> list[int]:
    ratio = longest / shortest
    return [round(shortest * ratio ** (n / (count - 1))) if count > 1 else shortest for n in range(count)]


def angle(form: str, pair: int, places: int, seconds: int, pairs: int) -> float:
    """The angle between a query and a key that are so many places and seconds apart."""
    turns = Fraction(places, waves(3, 40, pairs)[pair])
    if form == "places and times":
        turns += Fraction(seconds, waves(7, 100_000_000, pairs)[pair])
    return 2 * math.pi * float(turns % 1)  # whole turns change nothing


def place(layout: SequenceLayout, sample: int, index: int, group: int) -> int:
    """A token's index; the targets of each group count from the end of the history."""
    end = int(layout.history_end[sample])
    return index if index < end else end + (index - end) % group


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_explicit_rotations(form, group):
    heads, width = 2, 16
    mixer = build(form, f"num_layers: 1 mask {{ target_group_size: {group} }}", heads, width)
    sequence = wide(random_sequence(SHAPES), width)
    layout, block, pairs = sequence.layout, mixer.blocks[0], width // heads // 2
    visible = dense_mask(mixer.rules[0].mask, layout)
    actual = mixer(sequence).values.split(layout.lengths.tolist())
    bounds = layout.offsets.tolist()
    for sample, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        x = sequence.values[start:stop]
        key_time, query_time = (
            times[start:stop].tolist() for times in (sequence.timestamps, sequence.next_timestamps)
        )
        q, k, v = block.qkv(block.attention_norm(x)).detach().unflatten(1, (3, heads, -1)).unbind(1)
        attended = torch.zeros(stop - start, heads, width // heads, dtype=torch.float64)
        for i in range(stop - start):
            for head in range(heads):
                seen = [j for j in range(stop - start) if visible[sample, i, j]]
                scores = []
                for j in seen:
                    apart = place(layout, sample, i, group) - place(layout, sample, j, group)
                    score = 0.0
                    for pair in range(pairs):
                        turned = angle(form, pair, apart, query_time[i] - key_time[j], pairs)
                        query = complex(q[i, head, pair], q[i, head, pair + pairs])
                        key = complex(k[j, head, pair], k[j, head, pair + pairs])
                        score += (query * cmath.exp(1j * turned) * key.conjugate()).real
                    scores.append(score / math.sqrt(width / heads))
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                attended[i, head] = weights @ v[seen, head]
        expected = mixer.norm(block.finish(x, attended))
        torch.testing.assert_close(actual[sample], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_a_shift_of_all_times_and_places_changes_nothing(form):
    mixer = build(form, "num_layers: 2", 2, WIDTH + 2)
    sequence = wide(random_sequence([(6, 0)], contextual=0), WIDTH + 2)
    later = JaggedSequence(
        sequence.values, sequence.layout, sequence.timestamps + 10**9, sequence.next_timestamps + 10**9
    )
    torch.testing.assert_close(mixer(later).values, mixer(sequence).values, rtol=1e-11, atol=1e-11)
    rotary, before = mixer.rotary, SequenceLayout(torch.tensor([12_345]))
    between = []
    for rotation in (rotary(sequence, 1), rotary(later, 1, before)):
        query, key = (torch.complex(*waves)[:, 0] for waves in rotation)
        between.append(query[:, None] * key.conj())
    torch.testing.assert_close(*between, rtol=1e-11, atol=1e-11)


def test_single_precision_tells_seconds_apart():
    """In float32, today's times are 128 s apart; their remainders are exact."""
    config = text_format.Parse("shortest_seconds: 7 longest_seconds: 100", pb.RotaryPositions())
    rotary = RotaryPositions(config, width=4)
    now = torch.tensor([1_763_000_000, 1_763_000_001])
    layout = SequenceLayout(torch.tensor([1, 1]))
    rotation = rotary(JaggedSequence(torch.zeros(2, 4), layout, now, now), 1)
    assert rotation.key.dtype == torch.float32
    expected = [[math.cos(2 * math.pi * (t % p) / p) for p in (7, 100)] for t in now.tolist()]
    torch.testing.assert_close(rotation.key[0, :, 0], torch.tensor(expected), rtol=0, atol=1e-6)


def test_gradients_are_those_of_finite_differences():
    mixer = build("places and times", "num_layers: 1", 2, WIDTH + 2)
    sequence = wide(random_sequence([(3, 2), (2, 1)]), WIDTH + 2)
    torch.autograd.gradcheck(
        lambda values: mixer(sequence.with_values(values)).values, sequence.values.requires_grad_()
    )
