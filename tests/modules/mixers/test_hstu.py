from functools import partial

import pytest
import torch

from recsys import protos as pb
from recsys.modules.mixers import HstuMixer
from recsys.ops import AttentionMask, RelativeBias, hstu_attention
from tests.modules.mixers.sequences import WIDTH, random_sequence

SHAPES = [(5, 3), (0, 2), (6, 0)]


def config(**fields):
    return pb.HstuMixer(num_heads=2, qk_dim=4, v_dim=3, scale_len=5.0, mask={}, **fields)


@pytest.mark.parametrize("per_head", [False, True])
def test_layers_follow_each_other_each_with_its_own_bias(per_head):
    mask = {"window": 2, "prefix": 1, "target_window": True, "target_group_size": 2}
    given = config(num_layers=3, bias={"num_positions": 6, "num_time_buckets": 30, "per_head": per_head})
    given.mask.CopyFrom(pb.AttentionMask(**mask))
    mixer = HstuMixer(given, embedding_dim=WIDTH).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    sequence = random_sequence(SHAPES)
    x = sequence.values
    for layer, tables in zip(mixer.layers, mixer.biases, strict=True):
        assert tables.position.shape == ((2, 6) if per_head else (6,))
        bias = RelativeBias(tables.position, tables.time, sequence.timestamps, sequence.next_timestamps)
        attend = partial(
            hstu_attention, layout=sequence.layout, mask=AttentionMask(**mask), scale_len=5.0, bias=bias
        )
        x = layer(x, attend)
    torch.testing.assert_close(mixer(sequence).values, x)


def test_the_config_decides_the_form_of_the_layers():
    research = config(
        activation=pb.HstuMixer.UVQK, norm=pb.HstuMixer.GROUP_NORM, gate=pb.HstuMixer.UGN, dropout=0.25
    )
    (layer, _) = HstuMixer(research, embedding_dim=WIDTH).layers
    assert (layer.form.activation, layer.form.gate, layer.dropout.p) == ("uvqk", "ugn", 0.25)
    assert type(layer.norm).__name__ == "HeadNorm"
    (layer, _) = HstuMixer(config(), embedding_dim=WIDTH).layers
    assert (layer.form.activation, layer.form.gate, layer.dropout.p) == ("u", "concat", 0)
    assert type(layer.norm).__name__ == "LayerNorm"


def test_a_backend_that_is_not_there_is_an_error():
    mixer = HstuMixer(config(backend="warp_drive"), embedding_dim=WIDTH).double()
    with pytest.raises(ValueError, match="hstu_attention has no backend 'warp_drive'"):
        mixer(random_sequence(SHAPES))
