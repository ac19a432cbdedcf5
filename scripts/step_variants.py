"""The stack of one ranking config with several kinds of attention, which `bench_step.py` times."""

from dataclasses import dataclass

import recsys.config as config
from recsys import protos as pb
from recsys.errors import ConfigError

VARIANTS = {
    "full": (),
    "semi-local": ("semi-local",),
    "truncation": ("truncation",),
    "semi-local truncation": ("semi-local", "truncation"),
    "channels": ("channels",),
    "channels semi-local truncation": ("channels", "semi-local", "truncation"),
}
HASHED_ROWS = 10_000
"""Number of rows of the hashed tables that replace vocabularies."""


BATCHES = 2
"""Number of batches of the generated source."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a benchmark.

    Attributes:
        history, candidates: events and candidates of each row.
        batch: rows.
        window, prefix: window and prefix of semi-local attention, in events.
        tail: events that a truncation keeps.
        split_layer: layers before the truncation; None for half of them.
        backend: attention backend.
    """

    history: int
    batch: int
    candidates: int
    window: int
    prefix: int
    tail: int
    split_layer: int | None
    backend: str


def variant_of(base: pb.Pipeline, name: str, shape: Shape) -> pb.Pipeline:
    """Returns the resolved pipeline of a variant, on generated rows.

    Args:
        base: the config, not resolved.

    Raises:
        ConfigError: the config has no HSTU ranker, or the result is not a valid config.
    """
    if not base.model.HasField("ranker"):
        raise ConfigError("--config: model has no ranker; only ranking models are supported here")
    pipeline, parts = _without_files(base, shape), VARIANTS[name]
    ranker = pipeline.model.ranker
    stack = _stack(ranker.mixer)
    layers = sum(group.num_layers for group in stack.layer_groups) or stack.num_layers or 2
    stack.ClearField("num_layers")
    stack.ClearField("mask")
    del stack.layer_groups[:]
    mask = pb.AttentionMask()
    if "semi-local" in parts:
        mask = pb.AttentionMask(window=shape.window, prefix=shape.prefix, unit=pb.EVENTS)
    if "truncation" in parts:
        split = layers // 2 if shape.split_layer is None else shape.split_layer
        if not 0 < split < layers:
            raise ConfigError(f"--split-layer {split}: it must be from 1 to {layers - 1}, of {layers} layers")
        stack.layer_groups.add(num_layers=split, mask=mask)
        stack.layer_groups.add(num_layers=layers - split, mask=mask, tail_len=shape.tail, tail_unit=pb.EVENTS)
    else:
        stack.layer_groups.add(num_layers=layers, mask=mask)
    stack.backend = shape.backend
    del ranker.preprocessor.contextual.channels[:]
    if "channels" in parts:
        # Made-up actions are random bits: each of the two is in half of the events.
        for bit, channel in enumerate(("first", "second")):
            ranker.preprocessor.contextual.channels.add(name=channel, bits=[bit])
        stacks = [pb.ChannelStack(channel=channel, hstu=stack) for channel in ("first", "second")]
        ranker.mixer.mixture.CopyFrom(pb.MixtureMixer(stacks=stacks))
    else:
        ranker.mixer.hstu.CopyFrom(stack)
    if findings := config.check(pipeline):
        raise ConfigError([f"{name}: {finding}" for finding in findings])
    return config.resolve(pipeline, read_files=False).pipeline


def _without_files(base: pb.Pipeline, shape: Shape) -> pb.Pipeline:
    """Returns a copy that reads generated rows of one size."""
    pipeline = pb.Pipeline()
    pipeline.CopyFrom(base)
    pipeline.train.CopyFrom(pb.Train(num_steps=1))
    data = pipeline.data
    for name in ("train", "validation", "test", "vocabulary_dir", "stochastic_length"):
        data.ClearField(name)
    data.train.synthetic.CopyFrom(
        pb.SyntheticSource(
            num_rows=BATCHES * shape.batch,
            max_history_len=shape.history,
            min_history_len=shape.history,
            max_candidates=shape.candidates,
            min_candidates=shape.candidates,
        )
    )
    data.max_history_len, data.max_candidates = shape.history, shape.candidates
    data.batch_size, data.num_workers = shape.batch, 0
    for feature in pipeline.features:
        if feature.id.HasField("vocabulary"):
            feature.id.hash.num_buckets = feature.id.vocabulary.size or HASHED_ROWS
    return pipeline


def _stack(mixer: pb.Mixer) -> pb.HstuMixer:
    """A copy of the stack, or of the first one."""
    stack = pb.HstuMixer()
    if mixer.mixture.stacks:
        stack.CopyFrom(mixer.mixture.stacks[0].hstu)
    elif mixer.HasField("hstu"):
        stack.CopyFrom(mixer.hstu)
    else:
        raise ConfigError(
            "--config: model.ranker.mixer has no hstu; only variants of hstu are supported here"
        )
    return stack
