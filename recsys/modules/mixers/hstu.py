"""`HstuMixer`: a stack of sequential transduction units (arXiv 2402.17152)."""

from functools import partial

from torch import nn

from recsys import protos as pb
from recsys.modules.flops import attention_flops, linear_flops
from recsys.modules.mixers.mask import mask_of
from recsys.modules.sequence import JaggedSequence
from recsys.modules.stu import RelativeBiasTables, STULayer
from recsys.ops import SequenceLayout, hstu_attention
from recsys.registry import register

_ACTIVATION = {pb.HstuMixer.U: "u", pb.HstuMixer.UVQK: "uvqk"}
_NORM = {pb.HstuMixer.LAYER_NORM: "layer", pb.HstuMixer.GROUP_NORM: "group"}
_GATE = {pb.HstuMixer.UGN: "ugn", pb.HstuMixer.CONCAT: "concat"}


@register(pb.HstuMixer)
class HstuMixer(nn.Module):
    """Layers of equal form; each has bias tables of its own.

    Args:
        config: resolved (`v_dim`, `scale_len`, `bias.num_positions` filled in).
        embedding_dim: E.
    """

    def __init__(self, config: pb.HstuMixer, *, embedding_dim: int):
        super().__init__()
        layer = partial(
            STULayer,
            embedding_dim,
            num_heads=config.num_heads,
            qk_dim=config.qk_dim,
            v_dim=config.v_dim,
            activation=_ACTIVATION[config.activation],
            norm=_NORM[config.norm],
            gate=_GATE[config.gate],
            dropout=config.dropout,
        )
        self.layers = nn.ModuleList(layer() for _ in range(config.num_layers))
        self.biases = nn.ModuleList()
        if config.HasField("bias"):
            heads = config.num_heads if config.bias.per_head else None
            for _ in self.layers:
                self.biases.append(
                    RelativeBiasTables(config.bias.num_positions, config.bias.num_time_buckets, heads)
                )
        self.mask = mask_of(config.mask)
        self.attention_width = config.num_heads * (config.qk_dim + config.v_dim)
        self.attention = partial(
            hstu_attention,
            mask=self.mask,
            scale_len=config.scale_len,
            backend=config.backend,
            deterministic=config.deterministic if config.HasField("deterministic") else None,
        )

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """Tokens [T, E] in, mixed tokens [T, E] out."""
        x = sequence.values
        for number, layer in enumerate(self.layers):
            bias = self.biases[number](sequence) if self.biases else None
            x = layer(x, partial(self.attention, layout=sequence.layout, bias=bias))
        return sequence.with_values(x)

    def flops(self, layout: SequenceLayout) -> int:
        """FLOP of a forward pass over these tokens; see `recsys.modules.flops`."""
        attention = attention_flops(self.mask, layout, self.attention_width)
        return linear_flops(self.layers, layout.total_len) + len(self.layers) * attention
