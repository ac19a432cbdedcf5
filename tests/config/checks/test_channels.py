"""Rules and resolution of a history in channels."""

import pytest

from recsys import config
from tests.config_texts import RANKER, load

CHANNELS = "model.ranker.preprocessor.contextual.channels"

TWO_CHANNELS = [
    (["name: 'a' bits: 0", "name: 'b'"], ["a", "b"], None),
    (["name: 'b'", "name: 'a'"], ["a", "b"], "the stacks are for 'a', 'b'; "),
    (["name: 'a'", "name: 'a'"], ["a", "a"], f"{CHANNELS}[0].name: 'a' is the name of several channels"),
    (["name: 'a' bits: 63", "name: 'b'"], ["a", "b"], f"{CHANNELS}[0].bits[0]: 63 is given"),
    (["name: 'a' max_events: 0", "name: 'b'"], ["a", "b"], f"{CHANNELS}[0].max_events: 0 is given"),
    (["bits: 1", "name: 'b'"], ["", "b"], f"{CHANNELS}[0].name: not set"),
]


@pytest.mark.parametrize(("channels", "stacks", "expected"), TWO_CHANNELS)
def test_a_stack_for_each_channel(channels, stacks, expected, tmp_path):
    stack = "stacks {{channel: '{}' hstu {{qk_dim: 4}}}} "
    changes = [
        f"{CHANNELS}=[{', '.join('{' + item + '}' for item in channels)}]",
        f"model.ranker.mixer={{mixture {{{''.join(map(stack.format, stacks))}}}}}",
    ]
    loaded = load(RANKER, changes, tmp_path)
    findings = config.check(loaded.pipeline)
    assert bool(findings) == (expected is not None)
    assert expected is None or any(expected in finding for finding in findings)
    resolved = config.resolve(loaded.pipeline, read_files=False).pipeline.model
    for item in resolved.ranker.mixer.mixture.stacks:
        assert (item.hstu.v_dim, item.hstu.scale_len, item.hstu.num_layers) == (4, resolved.max_seq_len, 2)
