"""`CodeDecoder`: predicts the codes of an item one after another, given the state of a history.

Every layer is causal over the codes of one item: the first token is the state, and the token of level l + 1
is the embedding of code l. The decoder proceeds level by level and keeps the keys and values of earlier
levels, so training (one path per position) and scoring (every node of a trie) run the same code.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.modules.code_trie import CodeTrie

Cache = list[list[tuple[Tensor, Tensor]]]
"""The keys and values [..., E] of the levels so far, for each layer."""


class CodeEmbedding(nn.Module):
    """One table of embeddings for each level; the last row stands for the codes of unknown items.

    Args:
        sizes: number of values of each level.
        width: E.
        init_std: standard deviation of the initial rows.
    """

    def __init__(self, sizes: tuple[int, ...], width: int, init_std: float):
        super().__init__()
        self.starts = [sum(sizes[:level]) for level in range(len(sizes) + 1)]
        self.table = nn.Embedding(self.starts[-1] + 1, width)
        nn.init.normal_(self.table.weight, std=init_std)

    def forward(self, codes: Tensor) -> Tensor:
        """Sums the embeddings of each item's codes, [n, levels] -> [n, E]; unknown items have codes -1."""
        starts = torch.tensor(self.starts[:-1], device=codes.device)
        return self.table(torch.where(codes < 0, self.starts[-1], codes + starts)).sum(-2)

    def level(self, level: int, codes: Tensor) -> Tensor:
        """Returns the embeddings of known codes of one level, [...] -> [..., E]."""
        return self.table(codes + self.starts[level])


class CausalBlock(nn.Module):
    """Attention to the levels so far, then a feed-forward layer; each has a norm and a residual."""

    def __init__(self, config: pb.CodeDecoder, width: int):
        super().__init__()
        self.heads = config.num_heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, config.ff_dim), nn.GELU(), nn.Linear(config.ff_dim, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Maps the tokens of one level, [..., E], and appends their keys and values to `cache`."""
        query, key, value = self.query_key_value(self.norm(x)).chunk(3, -1)
        cache.append((key, value))
        query = self._split(query) * (x.shape[-1] // self.heads) ** -0.5
        scores = torch.stack([(query * self._split(key)).sum(-1) for key, _ in cache])
        shares = scores.float().softmax(0).to(x.dtype)
        parts = [share[..., None] * self._split(v) for share, (_, v) in zip(shares, cache, strict=True)]
        x = x + self.dropout(self.output(sum(parts[1:], parts[0]).flatten(-2)))
        return x + self.dropout(self.feed_forward(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


class CodeDecoder(nn.Module):
    """Computes the logits of each level, given the state of a history and the codes of earlier levels.

    Args:
        config: the message.
        sizes: number of values of each level.
        embed: embeddings of codes, which the tokens of the history use too.
        width: E.
    """

    def __init__(self, config: pb.CodeDecoder, sizes: tuple[int, ...], embed: CodeEmbedding, width: int):
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(torch.zeros(len(sizes), width))
        self.blocks = nn.ModuleList(CausalBlock(config, width) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.ModuleList(nn.Linear(width, size) for size in sizes)

    def forward(self, states: Tensor, codes: Tensor) -> Tensor:
        """Returns the mean over levels of the cross-entropy, given the codes of earlier levels, float32 [n].

        Args:
            states: [n, E].
            codes: int64 [n, levels], the codes of the items to predict.
        """
        cache, token, total = self._empty(), states, []
        for level, target in enumerate(codes.unbind(1)):
            logits = self._advance(level, token, cache)
            total.append(F.cross_entropy(logits, target, reduction="none"))
            token = self.embed.level(level, target)
        return torch.stack(total).mean(0)

    def scores(self, states: Tensor, trie: CodeTrie) -> Tensor:
        """Returns log P(item) of every item, float32 [B, items]: the sum of its codes' log-probabilities.

        The log-softmax of a level goes over all its values, whether or not an item has them. Every node of
        the trie is computed once for each state.

        Args:
            states: [B, E].
            trie: the codes of all items.
        """
        cache, token = self._empty(), states[:, None]
        log_probs = states.new_zeros(states.shape[0], 1, dtype=torch.float32)
        for level, size in enumerate(trie.sizes):
            logits = self._advance(level, token, cache)
            parent, code = trie.parent(level), trie.token(level)
            of_edges = logits.flatten(1).index_select(1, parent * size + code)
            log_probs = (log_probs - logits.logsumexp(2)).index_select(1, parent) + of_edges
            if level + 1 < trie.levels:
                select_nodes(cache, parent)
                token = self.embed.level(level, code).expand(states.shape[0], -1, -1)
        return torch.zeros_like(log_probs).index_copy(1, trie.item, log_probs)

    def flops(self, paths: int) -> int:
        """Counts the FLOP of the losses for `paths` states; see `recsys.modules.flops`."""
        layers = [m for block in self.blocks for m in block.modules() if isinstance(m, nn.Linear)]
        per_token = sum(layer.weight.numel() for layer in layers)
        levels, width = len(self.logits), self.positions.shape[1]
        pairs = levels * (levels + 1) // 2 * 2 * width * len(self.blocks)
        outputs = sum(layer.weight.numel() for layer in self.logits)
        return 2 * paths * (levels * per_token + pairs + outputs)

    def _empty(self) -> Cache:
        return [[] for _ in self.blocks]

    def _advance(self, level: int, token: Tensor, cache: Cache) -> Tensor:
        """Returns the logits [..., V] of a level, float32, and adds its token to the cache."""
        x = token + self.positions[level]
        for block, earlier in zip(self.blocks, cache, strict=True):
            x = block(x, earlier)
        return self.logits[level](self.norm(x)).float()


def select_nodes(cache: Cache, parent: Tensor) -> None:
    """Replaces keys and values of nodes by those of their edges in place: [B, nodes, E] -> [B, edges, E]."""
    for layer in cache:
        layer[:] = [(key.index_select(1, parent), value.index_select(1, parent)) for key, value in layer]
