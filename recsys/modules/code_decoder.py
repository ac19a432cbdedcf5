"""`CodeDecoder`: predicts the codes of an item one after another, given the state of a history.

Every layer is causal over the codes of one item: the first token is the state, the token of level l + 1 is
the embedding of code l. The decoder goes level by level and keeps the keys and values of the levels before,
so training (one path per position), scoring (every node of a trie), `better_items` and `beam_search` run the
same code, `CodeDecoder.advance`.

Instead of a state, the decoder may be given all encoded codes of a history. Then the first token is empty,
and every layer also attends to these codes. Their keys and values are computed once for all levels and paths.
Training computes all levels at once, and its histories are not padded.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.modules.code_encoder import EncodedCodes, head_dim_of
from recsys.modules.code_trie import CodeTrie
from recsys.ops import SequenceLayout, cross_attention, gather_rows, softmax_attention

Cache = list[list[tuple[Tensor, Tensor]]]
"""For each layer the keys and values [..., E] of the levels so far. Those of level 0 belong to the state,
which all paths of a row share."""

MULTIPLE = 32
"""Histories are padded to few lengths, because PyTorch's attention may build a plan for every new shape."""


class Memory(NamedTuple):
    """Keys and values of encoded histories for one layer, padded to the longest of B histories.

    Attributes:
        keys, values: [B, heads, S, width of a head].
        seen: bool [B, 1, 1, S], False in the padding.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor


class Start(NamedTuple):
    """The state of the decoder before level 0.

    Attributes:
        token: [B, 1, E], the first token of each row.
        memories: what each layer attends to besides earlier levels; [] if the token says everything.
    """

    token: Tensor
    memories: Sequence[Memory]


class CodeEmbedding(nn.Module):
    """One table of embeddings for each level; the last row stands for the codes of unknown items.

    Args:
        sizes: number of values of each level.
        width: E.
        init_std: standard deviation of the rows at the start.
        mean: whether an item is the mean of its codes' embeddings, instead of their sum.
    """

    first_rows: Tensor

    def __init__(self, sizes: tuple[int, ...], width: int, init_std: float, *, mean: bool = False):
        super().__init__()
        self.mean = mean
        self.starts = [sum(sizes[:level]) for level in range(len(sizes) + 1)]
        self.table = nn.Embedding(self.starts[-1] + 1, width)
        nn.init.normal_(self.table.weight, std=init_std)
        # A tensor on the device, because a CUDA graph cannot copy one from the host.
        self.register_buffer("first_rows", torch.tensor(self.starts[:-1]), persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        """Sums or averages the embeddings of the codes of each item, [n, levels] -> [n, E]; -1 is an unknown
        item's."""
        embeddings = self.each(codes)
        return embeddings.mean(-2) if self.mean else embeddings.sum(-2)

    def each(self, codes: Tensor) -> Tensor:
        """Returns the embedding of each code, [n, levels] -> [n, levels, E]; -1 is an unknown item's."""
        return self.table(torch.where(codes < 0, self.starts[-1], codes + self.first_rows))

    def level(self, level: int, codes: Tensor) -> Tensor:
        """Returns the embeddings of known codes of one level, [...] -> [..., E]."""
        return self.table(codes + self.starts[level])


class CausalBlock(nn.Module):
    """Attention to the levels so far, to a memory if there is one, then a feed-forward layer.

    Each has a norm and a residual.
    """

    def __init__(self, config: pb.CodeDecoder, width: int, *, has_memory: bool = False):
        super().__init__()
        self.heads, self.head_dim = config.num_heads, head_dim_of(config, width)
        inner = self.heads * self.head_dim
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * inner)
        self.output = nn.Linear(inner, width)
        self.read = MemoryAttention(width, self.heads, self.head_dim) if has_memory else None
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, config.ff_dim), nn.GELU(), nn.Linear(config.ff_dim, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: list[tuple[Tensor, Tensor]], memory: Memory | None = None) -> Tensor:
        """Maps the tokens of one level, [..., E], and appends their keys and values to `cache`.

        With a memory, tokens are [B, paths, E].
        """
        query, key, value = self.query_key_value(self.norm(x)).chunk(3, -1)
        cache.append((key, value))
        query = self._split(query) * self.head_dim**-0.5
        scores = torch.stack([(query * self._split(key)).sum(-1) for key, _ in cache])
        shares = scores.float().softmax(0).to(x.dtype)
        parts = [share[..., None] * self._split(v) for share, (_, v) in zip(shares, cache, strict=True)]
        x = x + self.dropout(self.output(sum(parts[1:], parts[0]).flatten(-2)))
        if memory is not None:
            x = x + self.dropout(self.read(x, memory))
        return self._fed_forward(x)

    def all_levels(self, x: Tensor, layout: SequenceLayout, histories: EncodedCodes) -> Tensor:
        """Computes `forward` for the tokens of all levels of all rows at once, [B * levels, E]."""
        qkv = (self._split(part) for part in self.query_key_value(self.norm(x)).chunk(3, -1))
        x = x + self.dropout(self.output(softmax_attention(*qkv, layout).flatten(1)))
        x = x + self.dropout(self.read.all_levels(x, layout, histories))
        return self._fed_forward(x)

    def _fed_forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.feed_forward(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


class MemoryAttention(nn.Module):
    """Attention of codes to the encoded codes of a history, with a norm of the former."""

    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, heads * head_dim)
        self.key_value = nn.Linear(width, 2 * heads * head_dim)
        self.output = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Maps [B, paths, E] to [B, paths, E]."""
        query = self.query(self.norm(x)).unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, memory.keys, memory.values, attn_mask=memory.seen)
        return self.output(out.transpose(1, 2).flatten(2))

    def all_levels(self, x: Tensor, layout: SequenceLayout, histories: EncodedCodes) -> Tensor:
        """Maps jagged tokens, [B * levels, E], to [B * levels, E], without padding of the histories."""
        split = (self.heads, self.head_dim)
        query = self.query(self.norm(x)).unflatten(1, split)
        key, value = self.key_value(histories.values).unflatten(1, (2, *split)).unbind(1)
        return self.output(cross_attention(query, key, value, layout, histories.layout).flatten(1))

    def memory(self, values: Tensor, padded: "Padding") -> Memory:
        """Computes keys and values of encoded codes, [T, E]."""
        key_value = self.key_value(values).unflatten(1, (2, self.heads, self.head_dim))
        rows = gather_rows(key_value, padded.index, padded.inverse).unflatten(0, padded.seen.shape)
        keys, values = rows.permute(2, 0, 3, 1, 4).unbind(0)
        return Memory(keys, values, padded.seen[:, None, None])


class Padding(NamedTuple):
    """The way from jagged tokens to padded ones: int64 [B * S] and its inverse [T], and bool [B, S]."""

    index: Tensor
    inverse: Tensor
    seen: Tensor

    @classmethod
    def of(cls, layout: SequenceLayout) -> "Padding":
        """Pads to the longest sample, outside traced graphs rounded up to a multiple of `MULTIPLE`."""
        length = layout.max_len
        if not torch.compiler.is_compiling():
            length = -(-length // MULTIPLE) * MULTIPLE
        position = torch.arange(length, device=layout.device)
        seen = position < layout.lengths[:, None]
        index = torch.where(seen, layout.offsets[:-1, None] + position, -1).flatten()
        return cls(index, layout.sample_ids() * length + layout.positions(), seen)


class CodeDecoder(nn.Module):
    """Computes the logits of each level, given the state of a history and the codes of earlier levels.

    Args:
        config: the message.
        sizes: number of values of each level.
        embed: embeddings of codes, which the tokens of the history use too.
        width: E.
        has_memory: whether histories are given as `EncodedCodes`, instead of one state.
    """

    def __init__(
        self,
        config: pb.CodeDecoder,
        sizes: tuple[int, ...],
        embed: CodeEmbedding,
        width: int,
        *,
        has_memory: bool = False,
    ):
        super().__init__()
        self.embed = embed
        self.has_memory = has_memory
        self.positions = nn.Parameter(torch.zeros(len(sizes), width))
        self.blocks = nn.ModuleList(
            CausalBlock(config, width, has_memory=has_memory) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.logits = nn.ModuleList(nn.Linear(width, size) for size in sizes)

    def forward(self, histories: Tensor | EncodedCodes, codes: Tensor) -> Tensor:
        """Returns the mean over levels of the cross-entropy, given the codes of earlier levels, float32 [n].

        Args:
            histories: states [n, E], or n encoded histories.
            codes: int64 [n, levels], the codes of the items to predict.
        """
        in_turn = isinstance(histories, Tensor)
        logits = self._in_turn(histories[:, None], codes) if in_turn else self._at_once(histories, codes)
        losses = [
            F.cross_entropy(of_level, target, reduction="none")
            for of_level, target in zip(logits, codes.unbind(1), strict=True)
        ]
        return torch.stack(losses).mean(0)

    def scores(self, histories: Tensor | EncodedCodes, trie: CodeTrie) -> Tensor:
        """Returns log P(item) of every item, float32 [B, items]: the sum of its codes' log-probabilities, or
        -inf for an item that the trie leaves out.

        The log-softmax of a level goes over all its values, whether or not an item has them. Every node of
        the trie is computed once for each state.

        Args:
            histories: states [B, E], or B encoded histories.
            trie: the codes of items.
        """
        (token, memories), cache = self.start(histories), self.empty_cache()
        scores = token.new_zeros(token.shape[:2], dtype=torch.float32)
        for level, size in enumerate(trie.sizes):
            logits = self.advance(level, token, cache, memories)
            parent, code = trie.parent(level), trie.token(level)
            of_edges = logits.flatten(1).index_select(1, parent * size + code)
            scores = (scores - logits.logsumexp(2)).index_select(1, parent) + of_edges
            if level + 1 < trie.levels:
                cache = select_paths(cache, lambda paths, parent=parent: paths.index_select(1, parent))
                token = self.embed.level(level, code).expand(token.shape[0], -1, -1)
        if trie.item.shape[0] < trie.leaf.shape[0]:
            scores = F.pad(scores, (0, 1), value=-torch.inf)
        return scores.index_select(1, trie.leaf)

    def flops(self, paths: int, memory_tokens: int = 0) -> int:
        """Counts the FLOP of the losses of `paths` histories; see `recsys.modules.flops`.

        Args:
            paths: number of states or encoded histories.
            memory_tokens: number of tokens of all encoded histories.
        """
        block, levels = self.blocks[0], len(self.logits)
        inner, per_memory_token = block.heads * block.head_dim, 0
        per_token = sum(m.weight.numel() for m in block.modules() if isinstance(m, nn.Linear))
        if block.read is not None:
            per_memory_token = block.read.key_value.weight.numel()
            per_token -= per_memory_token
        pairs = levels * (levels + 1) // 2 * paths + levels * memory_tokens
        blocks = levels * paths * per_token + memory_tokens * per_memory_token + pairs * 2 * inner
        outputs = sum(layer.weight.numel() for layer in self.logits)
        return 2 * (len(self.blocks) * blocks + paths * outputs)

    def start(self, histories: Tensor | EncodedCodes) -> Start:
        """Returns the first token of each row, and what the layers attend to.

        Args:
            histories: states [B, E]; `EncodedCodes` of B histories if the decoder has a memory.
        """
        if isinstance(histories, Tensor):
            return Start(histories[:, None], [])
        values, layout = histories
        padded = Padding.of(layout)
        memories = [block.read.memory(values, padded) for block in self.blocks]
        # The embedding of level 0 alone stands for the start.
        return Start(values.new_zeros(layout.batch_size, 1, values.shape[1]), memories)

    def empty_cache(self) -> Cache:
        """Returns the cache before level 0."""
        return [[] for _ in self.blocks]

    def advance(self, level: int, token: Tensor, cache: Cache, memories: Sequence[Memory] = ()) -> Tensor:
        """Returns the logits of a level, float32 [..., V], and adds its keys and values to the cache.

        Args:
            level: the level, from 0.
            token: [..., E], the first token for level 0, later the embedding of the code of the level before.
            cache: keys and values of the levels before, of shapes that broadcast with `token`.
            memories: those of `start`; with some, tokens are [B, paths, E].
        """
        x = token + self.positions[level]
        for number, (block, earlier) in enumerate(zip(self.blocks, cache, strict=True)):
            x = block(x, earlier, memories[number] if memories else None)
        return self.logits[level](self.norm(x)).float()

    def _in_turn(self, token: Tensor, codes: Tensor) -> Iterator[Tensor]:
        """Yields the logits of each level, float32 [n, V], given the codes of earlier levels.

        For a state this is faster on a CPU than all levels at once, and attention kernels of a GPU take no
        more than 65,535 samples, which the events of a batch may exceed.
        """
        cache = self.empty_cache()
        for level, code in enumerate(codes.unbind(1)):
            yield self.advance(level, token, cache)[:, 0]
            token = self.embed.level(level, code)[:, None]

    def _at_once(self, histories: EncodedCodes, codes: Tensor) -> Iterator[Tensor]:
        """Yields what `_in_turn` yields; each layer reads the histories once for all levels."""
        first = histories.values.new_zeros(len(codes), 1, histories.values.shape[1])
        written = [self.embed.level(level, code)[:, None] for level, code in enumerate(codes.unbind(1))]
        x = (torch.cat([first, *written[:-1]], 1) + self.positions).flatten(0, 1)
        layout = histories.layout.evenly(codes.shape[1])
        for block in self.blocks:
            x = block.all_levels(x, layout, histories)
        of_levels = self.norm(x).unflatten(0, codes.shape).unbind(1)
        for logits, of_level in zip(self.logits, of_levels, strict=True):
            yield logits(of_level).float()


def select_paths(cache: Cache, select: Callable[[Tensor], Tensor]) -> Cache:
    """Returns a cache whose keys and values of codes are selected; those of the state stay as they are."""
    return [[*layer[:1], *((select(key), select(value)) for key, value in layer[1:])] for layer in cache]
