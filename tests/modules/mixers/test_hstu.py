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


@pytest.mark.parametrize(("per_head", "alpha"), [(False, None), (True, 1.0)])
def test_layers_follow_each_other_each_with_its_own_bias(per_head, alpha):
    mask = {"window": 2, "prefix": 1, "target_window": True, "target_group_size": 2}
    given = config(num_layers=3, bias={"num_positions": 6, "num_time_buckets": 30, "per_head": per_head})
    given.mask.CopyFrom(pb.AttentionMask(**mask))
    if alpha is not None:
        given.alpha = alpha
    mixer = HstuMixer(given, embedding_dim=WIDTH).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    sequence = random_sequence(SHAPES)
    x = sequence.values
    for layer, tables in zip(mixer.layers, mixer.biases, strict=True):
        assert tables.position.shape == ((2, 6) if per_head else (6,))
        bias = RelativeBias(tables.position, tables.time, sequence.timestamps, sequence.next_timestamps)
        attend = partial(
            hstu_attention,
            layout=sequence.layout,
            mask=AttentionMask(**mask),
            alpha=alpha or 0.5,
            scale_len=5.0,
            bias=bias,
        )
        x = layer(x, attend)
    torch.testing.assert_close(mixer(sequence).values, x)


def test_tokens_between_layers_are_as_wide_as_products_are():
    """The sums of the layers are rounded, once a layer; who calls a mixer gets the type that he gave."""
    mixer = HstuMixer(config(num_layers=3), embedding_dim=WIDTH).eval()
    sequence = random_sequence(SHAPES)
    sequence = sequence.with_values(sequence.values.float())
    seen = []
    for layer in mixer.layers:
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    exact = mixer(sequence).values
    assert seen == [torch.float32] * 3
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = mixer(sequence).values
    assert seen == [torch.bfloat16] * 3
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, rounded.bfloat16().float(), rtol=0, atol=0)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)


def test_the_config_decides_the_form_of_the_layers():
    research = config(
        activation=pb.HstuMixer.UVQK, norm=pb.HstuMixer.GROUP_NORM, gate=pb.HstuMixer.UGN, dropout=0.25
    )
    (layer, _) = HstuMixer(research, embedding_dim=WIDTH).layers
    assert (layer.config.activation, layer.config.gate, layer.dropout.p) == ("uvqk", "ugn", 0.25)
    assert type(layer.norm).__name__ == "HeadNorm"
    (layer, _) = HstuMixer(config(), embedding_dim=WIDTH).layers
    assert (layer.config.activation, layer.config.gate, layer.dropout.p) == ("u", "concat", 0)
    assert type(layer.norm).__name__ == "LayerNorm"


def test_input_and_output_dropout_stand_at_both_ends():
    mixer = HstuMixer(config(input_dropout=0.25, output_dropout=0.5), embedding_dim=WIDTH).double()
    assert (mixer.input_dropout.p, mixer.output_dropout.p) == (0.25, 0.5)
    sequence = random_sequence(SHAPES)
    mixer.output_dropout.p, mixer.input_dropout.p = 0.0, 1.0
    nothing = mixer.eval()(sequence.with_values(torch.zeros_like(sequence.values))).values
    torch.testing.assert_close(mixer.train()(sequence).values, nothing)
    mixer.output_dropout.p = 1.0
    assert not mixer(sequence).values.any()
    assert mixer.eval()(sequence).values.any()


def test_layers_are_left_out_by_sample_the_last_one_most():
    mixer = HstuMixer(config(num_layers=2, stochastic_depth=0.5), embedding_dim=WIDTH).double()
    assert [depth.probability for depth in mixer.depths] == [0.25, 0.5]
    sequence = random_sequence(SHAPES)
    torch.testing.assert_close(mixer.eval()(sequence).values, mixer(sequence).values, rtol=0, atol=0)
    first, second = mixer.depths
    first.probability, second.probability = 0.0, 1 - 2**-52  # the last layer never, the first always
    one_layer = HstuMixer(config(num_layers=1), embedding_dim=WIDTH).double().eval()
    one_layer.load_state_dict(mixer.state_dict(), strict=False)
    torch.testing.assert_close(mixer.train()(sequence).values, one_layer(sequence).values)
    # Half of the samples go around the last layer, the others take it twice.
    second.probability = 0.5
    added = mixer.eval()(sequence).values - one_layer(sequence).values
    lengths, seen = sequence.layout.lengths.tolist(), set()
    for _ in range(20):
        factor = ((mixer.train()(sequence).values - one_layer(sequence).values) / added).detach()
        for sample in factor.split(lengths):
            torch.testing.assert_close(sample, sample.round()[:1, :1].expand_as(sample))
            seen.add(round(float(sample[0, 0])))
    assert seen == {0, 2}


@pytest.mark.parametrize("form", [{}, {"activation": pb.HstuMixer.UVQK, "norm": pb.HstuMixer.GROUP_NORM}])
def test_recompute_goes_with_truncation_bias_dropout_and_stochastic_depth(form):
    """Each choice gives, bit by bit, the gradients of none."""
    groups = [{"num_layers": 1, "mask": {"window": 3}}, {"num_layers": 2, "tail_len": 4}]
    sequence, results = random_sequence(SHAPES), []
    for recompute in ([], [pb.NORMED_X], [pb.UVQK], [pb.GATED], [pb.NORMED_X, pb.UVQK, pb.GATED]):
        given = pb.HstuMixer(num_heads=2, qk_dim=4, v_dim=3, scale_len=5.0, layer_groups=groups, **form)
        noise = {"dropout": 0.2, "input_dropout": 0.1, "output_dropout": 0.1, "stochastic_depth": 0.4}
        given.MergeFrom(pb.HstuMixer(recompute=recompute, bias={"num_positions": 6}, **noise))
        torch.manual_seed(0)
        mixer = HstuMixer(given, embedding_dim=WIDTH).double()
        values = sequence.values.clone().requires_grad_()
        mixed = mixer(sequence.with_values(values)).values
        cotangent = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1), dtype=mixed.dtype)
        results.append([mixed, *torch.autograd.grad(mixed, [values, *mixer.parameters()], cotangent)])
    for result in results[1:]:
        assert all(torch.equal(got, want) for got, want in zip(result, results[0], strict=True))
    assert results[0][0].shape[0] < sequence.layout.total_len


def test_a_backend_that_is_not_there_is_an_error():
    mixer = HstuMixer(config(backend="warp_drive"), embedding_dim=WIDTH).double()
    with pytest.raises(ValueError, match="hstu_attention has no backend 'warp_drive'"):
        mixer(random_sequence(SHAPES))
