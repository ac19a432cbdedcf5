"""Targets behind a cache, against whole samples in `forward`, which other tests compare with the spec."""

import dataclasses

import pytest
import torch
from google.protobuf import text_format

from recsys import protos as pb
from recsys.config import registry
from recsys.modules.cache import NotExtendableError
from recsys.modules.mixers import cached_stack
from recsys.modules.sequence import JaggedSequence, join
from recsys.ops import Selection, SequenceLayout
from tests.modules.mixers.sequences import WIDTH, random_sequence

# (history, targets): shorter than, as long as and longer than the tails; none; no targets; neither.
SHAPES = [(5, 3), (0, 2), (12, 2), (0, 0), (9, 0), (1, 7), (4, 1)]
STACK = "num_heads: 2 qk_dim: 4 v_dim: 3 scale_len: 3"
BIAS = "bias { num_positions: 7 num_time_buckets: 40 }"
PLACES = "bias { num_positions: 7 num_time_buckets: 0 per_head: true }"
GROUPS = {
    "plain": "num_layers: 3",
    "one layer": "num_layers: 1",
    "masks": """layer_groups { num_layers: 1 mask { window: 3 prefix: 2 } }
        layer_groups { num_layers: 2 mask { window: 2 target_window: true target_group_size: 2 } }""",
    "tail": """layer_groups { num_layers: 2 mask { window: 3 prefix: 1 } }
        layer_groups { num_layers: 1 mask { contextual_reads_history: false } tail_len: 4 }""",
    "tails": """layer_groups { num_layers: 1 tail_len: 9 mask { window: 4 } }
        layer_groups { num_layers: 1 tail_len: 5 mask { window: 2 prefix: 1 target_window: true } }
        layer_groups { num_layers: 2 tail_len: 5 mask { target_group_size: 3 } }
        layer_groups { num_layers: 1 mask { window: 1 } }""",
    "nothing left": "layer_groups { num_layers: 1 } layer_groups { num_layers: 1 tail_len: 0 }",
}
STACKS = {
    **{name: f"{STACK} {groups}" for name, groups in GROUPS.items()},
    "biased masks": f"{STACK} {BIAS} {GROUPS['masks']}",
    "biased tails": f"{STACK} {BIAS} {GROUPS['tails']}",
    "places": f"{STACK} {PLACES} {GROUPS['plain']}",
    "research form": f"{STACK} num_layers: 2 activation: UVQK gate: UGN norm: GROUP_NORM alpha: 1",
}
MIXERS = {name: f"hstu {{ {stack} }}" for name, stack in STACKS.items()} | {
    f"{name} channels": f"mixture {{ {' '.join(f'stacks {{ hstu {{ {STACKS[n]} }} }}' for n in stacks)} }}"
    for name, stacks in (("equal", ["tails"] * 3), ("unlike", ["tail", "biased masks", "tail"]))
}
LINEAR = "num_heads: 2 qk_dim: 4 v_dim: 3 feed_forward_dim: 5"
SASREC = "sasrec { num_layers: 2 num_heads: 2 feed_forward_dim: 5 }"
ROTARY = "num_heads: 1 feed_forward_dim: 5 rotary { shortest_tokens: 3 }"
ORDER = ROTARY.replace("rotary {", "rotary { longest_seconds: 0")
MIXERS |= {f"rotary {name}": f"sasrec {{ {ROTARY} {GROUPS[name]} }}" for name in ("masks", "tails")}
MIXERS["linear"] = f"linear {{ {LINEAR} num_layers: 2 form: DELTA }}"
MIXERS["hybrid"] = f"""hybrid {{ mixers {{ linear {{ {LINEAR} num_layers: 1 form: GATED }} }}
    mixers {{ hstu {{ {STACK} {BIAS} layer_groups {{ num_layers: 1 }}
      layer_groups {{ num_layers: 1 tail_len: 4 }} }} }}
    mixers {{ linear {{ {LINEAR} num_layers: 2 form: RETENTION }} }} mixers {{ {SASREC} }} }}"""
# Events of the channels: unlike, and some have none.
CHANNELS = [SHAPES, [(n // 2, m) for n, m in SHAPES], [(13 - n, m) for n, m in SHAPES]]


def build(text: str, dtype=torch.float64):
    chosen = registry.pick(text_format.Parse(text, pb.Mixer()))
    torch.manual_seed(0)
    mixer = chosen.cls(chosen.config, embedding_dim=WIDTH).to(dtype).eval()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return mixer


def inputs(mixer, *, contextual=2, dtype=torch.float64) -> JaggedSequence:
    """A sequence for the mixer; channels have the same targets at the same times."""
    if not hasattr(mixer, "stacks"):
        return random_sequence(SHAPES, contextual=contextual, dtype=dtype)
    channels = [
        random_sequence(shapes, contextual=contextual, dtype=dtype, seed=n)
        for n, shapes in enumerate(CHANNELS[: len(mixer.stacks)])
    ]
    first = channels[0]
    of_targets = first.take(first.layout.targets_only())
    for channel in channels[1:]:
        is_target = channel.layout.kinds() == 2
        for name in ("timestamps", "next_timestamps"):
            getattr(channel, name)[is_target] = getattr(of_targets, name)
    return join(channels)


def prefix_of(sequence: JaggedSequence) -> JaggedSequence:
    return sequence.take(sequence.layout.without_targets())


def targets_of(sequence: JaggedSequence) -> JaggedSequence:
    return sequence.take(sequence.layout.targets_only())


def cached_targets(mixer, sequence) -> torch.Tensor:
    with torch.no_grad():
        return mixer.score(targets_of(sequence), mixer.prefill(prefix_of(sequence))).targets()


@pytest.fixture(params=MIXERS)
def mixer(request):
    return build(MIXERS[request.param])


@pytest.mark.parametrize("contextual", [0, 3])
def test_targets_become_what_they_are_in_whole_samples(mixer, contextual):
    sequence = inputs(mixer, contextual=contextual)
    expected = mixer(sequence)
    with torch.no_grad():
        actual = mixer.score(targets_of(sequence), mixer.prefill(prefix_of(sequence)))
    torch.testing.assert_close(actual.targets(), expected.targets(), rtol=1e-10, atol=1e-10)
    assert torch.equal(actual.target_times(), expected.target_times())
    first = sequence.layout.parts[0] if sequence.layout.parts else sequence.layout
    assert actual.layout.num_targets.tolist() == first.num_targets.tolist()


def test_single_precision_is_as_far_off_as_without_a_cache(mixer):
    sequence = inputs(mixer)
    exact = mixer(sequence).targets()
    mixer.float()
    sequence = sequence.with_values(sequence.values.float())
    rounded, actual = mixer(sequence).targets(), cached_targets(mixer, sequence)
    assert actual.dtype == rounded.dtype == torch.float32
    allowed = 1.5 * (rounded - exact).norm() + 1e-6 * exact.norm()
    assert (actual - exact).norm() <= allowed


def test_bfloat16_is_as_far_off_as_without_a_cache(mixer):
    sequence = inputs(mixer)
    exact = mixer(sequence).targets()
    mixer.float()
    sequence = sequence.with_values(sequence.values.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, actual = mixer(sequence).targets(), cached_targets(mixer, sequence)
    assert actual.dtype == rounded.dtype
    allowed = 1.5 * (rounded - exact).norm() + 1e-3 * exact.norm()
    assert (actual - exact).norm() <= allowed


@pytest.mark.parametrize("size", [1, 3])
def test_targets_in_slices(mixer, size):
    # A group is never cut: those of 2 and 3 targets end together after 6.
    size = 6 * size if mixer.target_group_size > 1 else size
    sequence = inputs(mixer)
    whole, targets = mixer(sequence).targets(), targets_of(sequence)
    rows = torch.arange(len(whole))
    first = targets.layout.parts[0] if targets.layout.parts else targets.layout
    with torch.no_grad():
        cache = mixer.prefill(prefix_of(sequence))
        for start in range(0, 7, size):
            selected = targets.take(targets.layout.targets_between(start, start + size))
            expected = whole[rows[first.targets_between(start, start + size).index]]
            torch.testing.assert_close(mixer.score(selected, cache).targets(), expected)


def test_selected_samples_and_other_devices(mixer):
    sequence, chosen = inputs(mixer), [5, 2, 0, 2]
    with torch.no_grad():
        cache = mixer.prefill(prefix_of(sequence))
        expected = mixer(sequence.take(sequence.layout.select(chosen))).targets()
        targets = targets_of(sequence)
        selected = targets.take(targets.layout.select(chosen))
        actual = mixer.score(selected, cache.select(chosen).to("cpu")).targets()
    torch.testing.assert_close(actual, expected)
    away = cache.to("meta")
    assert {tensor.device.type for stage in stages_of(away) for tensor in stage.tensors} == {"meta"}
    assert all(stage.layout.device.type == "meta" for stage in stages_of(away) if hasattr(stage, "layout"))
    assert away.num_bytes == cache.num_bytes


def test_bytes_are_those_of_keys_values_and_times():
    mixer = build(f"hstu {{ {STACK} {BIAS} {GROUPS['tail']} }}")
    with torch.no_grad():
        cache = mixer.prefill(prefix_of(inputs(mixer)))
    tokens = [2 + events for events, _ in SHAPES]
    left = [2 + min(events, 4) for events, _ in SHAPES]
    numbers = 2 * (4 + 3) * (2 * sum(tokens) + sum(left))
    assert cache.num_bytes == 8 * (numbers + sum(tokens) + sum(left))
    ((before, behind),) = cache.stacks
    assert before.layout.lengths.tolist() == tokens and behind.layout.lengths.tolist() == left
    assert len(before.keys) == 2 and len(behind.keys) == 1
    # No tensor is a view that keeps a larger one.
    for tensor in (*before.keys, *before.values, *behind.keys, *behind.values):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_the_module_keeps_nothing(mixer):
    sequence = inputs(mixer)
    state = {name: id(value) for name, value in vars(mixer).items()}
    first = cached_targets(mixer, sequence)
    changed = sequence.with_values(sequence.values.flip(1))
    assert not torch.allclose(cached_targets(mixer, changed), first)
    assert torch.equal(cached_targets(mixer, sequence), first)
    assert {name: id(value) for name, value in vars(mixer).items()} == state


def test_no_samples_and_no_targets(mixer):
    sequence = inputs(mixer)
    for samples in ([], [3], [4]):
        selected = sequence.take(sequence.layout.select(samples))
        assert cached_targets(mixer, selected).shape == (0, WIDTH)


def test_targets_that_others_do_not_have(mixer):
    """Targets behind the cache need not be those that were known when it was filled."""
    sequence = inputs(mixer)
    targets = targets_of(sequence)
    counts = [1, 1, 0]
    with torch.no_grad():
        cache = mixer.prefill(prefix_of(sequence)).select(counts)
        actual = mixer.score(targets.take(targets.layout.select([5, 2, 5])), cache).targets()
    # One whole sample after the other, put together by hand from history of one and targets of another.
    expected = []
    for history, asked in zip(counts, [5, 2, 5], strict=True):
        pairs = [
            pair(part, history, asked) for part in (sequence.split() if sequence.layout.parts else [sequence])
        ]
        expected.append(mixer(join(pairs) if sequence.layout.parts else pairs[0]).targets())
    torch.testing.assert_close(actual, torch.cat(expected))


def pair(sequence: JaggedSequence, history: int, asked: int) -> JaggedSequence:
    layout, offsets = sequence.layout, sequence.layout.offsets.tolist()
    ends = layout.history_end.tolist()
    rows = [*range(offsets[history], offsets[history] + ends[history])]
    rows += range(offsets[asked] + ends[asked], offsets[asked + 1])
    count = torch.tensor([len(rows)])
    alone = SequenceLayout(count, layout.num_targets[[asked]], layout.num_contextual)
    return sequence.take(Selection(alone, torch.tensor(rows, dtype=torch.int64)))


def test_what_does_not_fit_is_refused(mixer):
    sequence = inputs(mixer)
    with torch.no_grad():
        cache = mixer.prefill(prefix_of(sequence))
        with pytest.raises(
            ValueError, match=r"prefill takes only contextual and history tokens, but \d+ targets"
        ):
            mixer.prefill(sequence)
        targets = targets_of(sequence)
        with pytest.raises(ValueError, match="of cache_layout|initial_state must have shape"):
            mixer.score(targets.take(targets.layout.select([0, 1])), cache)
        mixer.train()
        for call in (
            lambda: mixer.prefill(prefix_of(sequence)),
            lambda: mixer.score(targets, cache),
            lambda: mixer.extend(targets, cache),
        ):
            with pytest.raises(RuntimeError, match="a cache is for a model in evaluation mode"):
                call()
    mixer.eval()
    if any(hasattr(stage, "keys") for stage in stages_of(cache)):
        with pytest.raises(RuntimeError, match=r"call it under torch.no_grad\(\)"):
            mixer.score(targets_of(sequence), cache)


# What a stack must be for its cache to grow.
BLIND = "mask { contextual_reads_history: false }"
GROWING = {
    "blind contextual tokens": (f"num_layers: 3 {BLIND}", 2),
    "no contextual tokens": ("num_layers: 3 mask { window: 2 prefix: 1 }", 0),
    "places": (f"{PLACES} num_layers: 2 {BLIND}", 2),
    "one layer": ("num_layers: 1", 2),
    "contextual tokens of the last layer": (
        f"layer_groups {{ num_layers: 2 {BLIND} }} layer_groups {{ num_layers: 1 }}",
        2,
    ),
    "a tail in front of the last layer": (
        f"layer_groups {{ num_layers: 2 {BLIND} }} layer_groups {{ num_layers: 1 tail_len: 4 }}",
        2,
    ),
    "a tail in front of the only layer": ("layer_groups { num_layers: 1 tail_len: 4 }", 2),
    "a tail that cuts nothing": (
        f"layer_groups {{ num_layers: 1 {BLIND} }} layer_groups {{ num_layers: 2 {BLIND} tail_len: 15 }}",
        2,
    ),
    "times without contextual tokens, one layer": (f"{BIAS} num_layers: 1", 0),
    "masks": (
        """layer_groups { num_layers: 1 mask { window: 3 prefix: 2 contextual_reads_history: false } }
        layer_groups { num_layers: 2 mask { window: 2 target_window: true target_group_size: 2
          contextual_reads_history: false } }""",
        2,
    ),
}
ADDED = [2, 0, 3, 1, 0, 1, 4]


def grown(sequence: JaggedSequence, events: list[int]) -> tuple[JaggedSequence, JaggedSequence]:
    """The prefix less its newest events, and these alone."""
    layout, offsets = sequence.layout, sequence.layout.offsets.tolist()
    old, new = [], []
    taken = [min(n, uih) for n, uih in zip(events, layout.num_uih.tolist(), strict=True)]
    for start, end, count in zip(offsets[:-1], offsets[1:], taken, strict=True):
        old += range(start, end - count)
        new += range(end - count, end)
    count = torch.tensor(taken)
    layouts = (SequenceLayout(layout.lengths - count, None, layout.num_contextual), SequenceLayout(count))
    return tuple(
        sequence.take(Selection(part, torch.tensor(rows, dtype=torch.int64)))
        for part, rows in zip(layouts, (old, new), strict=True)
    )


def stages_of(cache):
    return [stage for stack in cache.stacks for stage in stack]


@pytest.mark.parametrize("case", GROWING)
@pytest.mark.parametrize("channels", [1, 2])
def test_a_cache_grows_into_that_of_the_whole_history(case, channels):
    stack, contextual = GROWING[case]
    stack = f"hstu {{ {STACK} {stack} }}"
    mixer = build(stack if channels == 1 else f"mixture {{ {f'stacks {{ {stack} }}' * channels} }}")
    sequence = inputs(mixer, contextual=contextual)
    prefix = prefix_of(sequence)
    pieces = [grown(part, ADDED) for part in (prefix.split() if channels > 1 else [prefix])]
    old, new = (join(list(entry)) if channels > 1 else entry[0] for entry in zip(*pieces, strict=True))
    with torch.no_grad():
        before = mixer.prefill(old)
        after = mixer.extend(new, before)
        expected = mixer.prefill(prefix)
        for actual, wanted in zip(stages_of(after), stages_of(expected), strict=True):
            assert actual.layout.lengths.tolist() == wanted.layout.lengths.tolist()
            assert [len(actual.layout.parts)] == [len(wanted.layout.parts)]
            for name in ("keys", "values"):
                torch.testing.assert_close(
                    getattr(actual, name), getattr(wanted, name), rtol=1e-10, atol=1e-10
                )
            if wanted.timestamps is not None:
                assert torch.equal(actual.timestamps, wanted.timestamps)
        scores = mixer.score(targets_of(sequence), after).targets()
        torch.testing.assert_close(scores, mixer(sequence).targets(), rtol=1e-10, atol=1e-10)
        # The old cache is what it was.
        again = mixer.prefill(old)
        assert torch.equal(stages_of(before)[-1].keys[-1], stages_of(again)[-1].keys[-1])


UNTIMED = "time_channel: false"
GROWING_MIXERS = {
    "delta": f"linear {{ {LINEAR} num_layers: 2 form: DELTA {UNTIMED} }}",
    "retention": f"linear {{ {LINEAR} num_layers: 2 form: RETENTION {UNTIMED} position_channel: false }}",
    "times, one layer": f"linear {{ {LINEAR} num_layers: 1 }}",
    "hybrid": f"""hybrid {{ mixers {{ linear {{ {LINEAR} num_layers: 2 form: GATED {UNTIMED} }} }}
        mixers {{ hstu {{ {STACK} num_layers: 2 {BLIND} }} }}
        mixers {{ sasrec {{ num_layers: 1 num_heads: 2 feed_forward_dim: 5 {BLIND} }} }}
        mixers {{ linear {{ {LINEAR} num_layers: 1 form: DELTA }} }} }}""",
    "rotary": f"sasrec {{ {ORDER} num_layers: 2 {BLIND} }}",
    "rotary before a tail that cuts nothing": f"""sasrec {{ {ORDER} layer_groups {{ num_layers: 1 {BLIND} }}
        layer_groups {{ num_layers: 1 tail_len: 12 }} }}""",
}


@pytest.mark.parametrize("case", GROWING_MIXERS)
def test_states_grow_into_those_of_the_whole_history(case):
    mixer = build(GROWING_MIXERS[case])
    sequence = inputs(mixer)
    old, new = grown(prefix_of(sequence), ADDED)
    with torch.no_grad():
        before = mixer.prefill(old)
        copies = [[tensor.clone() for tensor in stage.tensors] for stage in stages_of(before)]
        after, expected = mixer.extend(new, before), mixer.prefill(prefix_of(sequence))
        for actual, wanted in zip(stages_of(after), stages_of(expected), strict=True):
            torch.testing.assert_close(actual.tensors, wanted.tensors, rtol=1e-9, atol=1e-9)
        scores = mixer.score(targets_of(sequence), after).targets()
        torch.testing.assert_close(scores, mixer(sequence).targets(), rtol=1e-9, atol=1e-9)
    for stage, copy in zip(stages_of(before), copies, strict=True):
        assert all(map(torch.equal, stage.tensors, copy))


REFUSED_MIXERS = {
    "times in two layers": (f"linear {{ {LINEAR} num_layers: 2 }}", "linear.time_channel"),
    "times before a mixer": (
        f"hybrid {{ mixers {{ linear {{ {LINEAR} num_layers: 1 }} }} mixers {{ linear {{ {LINEAR} }} }} }}",
        "linear.time_channel",
    ),
    "contextual tokens before a mixer": (
        f"hybrid {{ mixers {{ hstu {{ {STACK} num_layers: 1 }} }} mixers {{ linear {{ {LINEAR} }} }} }}",
        "contextual tokens read the history, as in layer 0",
    ),
    "rotary times": (f"sasrec {{ {ROTARY} num_layers: 2 {BLIND} }}", "rotary.longest_seconds > 0"),
    "places behind a tail": (
        f"sasrec {{ {ORDER} layer_groups {{ num_layers: 1 tail_len: 9 }} }}",
        "12 tokens of a history would reach layer 0, whose tail_len is 9",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MIXERS)
def test_states_that_would_be_wrong_do_not_grow(case):
    text, message = REFUSED_MIXERS[case]
    mixer = build(text)
    old, new = grown(prefix_of(inputs(mixer)), ADDED)
    with torch.no_grad():
        cache = mixer.prefill(old)
        with pytest.raises(NotExtendableError, match="cannot be extended.*" + message):
            mixer.extend(new, cache)


REFUSED = {
    "contextual_reads_history": ("num_layers: 2", "contextual tokens read the history, as in layer 0"),
    "second layer": (
        f"layer_groups {{ num_layers: 1 {BLIND} }} layer_groups {{ num_layers: 2 }}",
        "contextual tokens read the history, as in layer 1",
    ),
    "tail": (
        f"layer_groups {{ num_layers: 1 {BLIND} }} layer_groups {{ num_layers: 2 {BLIND} tail_len: 9 }}",
        "12 tokens of a history would reach layer 1, whose tail_len is 9",
    ),
    "times": (f"{BIAS} num_layers: 2 {BLIND}", "bias.num_time_buckets > 0"),
    "times of contextual tokens": (f"{BIAS} num_layers: 1 {BLIND}", "bias.num_time_buckets > 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_cache_that_would_be_wrong_does_not_grow(case):
    """And it would be: what `extend` refuses differs from a fresh prefill."""
    stack, message = REFUSED[case]
    mixer = build(f"hstu {{ {STACK} {stack} }}")
    sequence = prefix_of(inputs(mixer))
    old, new = grown(sequence, ADDED)
    # As it was known then: the last event of each sample was followed by the request.
    with torch.no_grad():
        cache = mixer.prefill(old)
        with pytest.raises(ValueError, match="cannot be extended.*" + message):
            mixer.extend(new, cache)


@pytest.mark.parametrize("case", ["contextual_reads_history", "second layer", "tail"])
def test_what_is_refused_would_be_wrong(monkeypatch, case):
    mixer = build(f"hstu {{ {STACK} {REFUSED[case][0]} }}")
    sequence = prefix_of(inputs(mixer))
    old, new = grown(sequence, ADDED)
    for name in ("require_extendable", "_require_uncut"):
        monkeypatch.setattr(cached_stack, name, lambda *_, **named: None)
    with torch.no_grad():
        actual = stages_of(mixer.extend(new, mixer.prefill(old)))[-1]
        wanted = stages_of(mixer.prefill(sequence))[-1]
    if case == "tail":
        actual = actual.truncate(9)
    assert actual.layout.lengths.tolist() == wanted.layout.lengths.tolist()
    assert (actual.values[-1] - wanted.values[-1]).norm() > 1e-2 * wanted.values[-1].norm()


def test_time_makes_an_old_event_another_one():
    """Why times are refused: prefill before the next event was known, and after."""
    mixer = build(f"hstu {{ {STACK} {BIAS} num_layers: 2 {BLIND} }}")
    sequence = prefix_of(inputs(mixer))
    later = dataclasses.replace(sequence, next_timestamps=sequence.next_timestamps + 10**6)
    with torch.no_grad():
        first, second = (stages_of(mixer.prefill(given))[0] for given in (sequence, later))
    assert torch.equal(first.keys[0], second.keys[0]) and not torch.allclose(first.keys[1], second.keys[1])


def test_only_new_events_extend():
    mixer = build(f"hstu {{ {STACK} num_layers: 1 }}")
    sequence = inputs(mixer)
    with torch.no_grad():
        cache = mixer.prefill(prefix_of(sequence))
        with pytest.raises(ValueError, match="0 contextual tokens per sample and 15 targets are given"):
            mixer.extend(targets_of(sequence), cache)
        with pytest.raises(ValueError, match="2 contextual tokens per sample and 0 targets are given"):
            mixer.extend(prefix_of(sequence), cache)
