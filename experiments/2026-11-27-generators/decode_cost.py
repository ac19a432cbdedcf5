"""CPU time a row of scoring all items and of a beam, by the number of items. Prints a table.

python experiments/2026-11-27-generators/decode_cost.py
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from recsys import protos as pb
from recsys.modules.beam_search import SeenItems, beam_search
from recsys.modules.code_decoder import CodeDecoder, CodeEmbedding
from recsys.modules.code_trie import CodeTrie

SIZES, WIDTH, ROWS = (256, 256, 256), 64, 16


def milliseconds(run: Callable[[], object]) -> float:
    """Returns the least CPU time of a row in five runs."""
    times = []
    for _ in range(6):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times[1:]) / ROWS


def main() -> None:
    """Measures every size of the catalogue."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = pb.CodeDecoder(num_layers=1, num_heads=2, ff_dim=128)
    decoder = CodeDecoder(config, SIZES, CodeEmbedding(SIZES, WIDTH, 0.02), WIDTH).eval()
    states, nothing = torch.randn(ROWS, WIDTH), torch.zeros(0, dtype=torch.int64)
    seen = SeenItems(nothing, nothing)
    print("items   exact  beam 20  beam 50  beam 200   ms of CPU a row")
    for items in (100, 300, 1000, 3000, 10_000, 100_000):
        codes = np.random.default_rng(0).permutation(256**3)[:items]
        trie = CodeTrie(np.stack([codes // 256**2, codes // 256 % 256, codes % 256], 1), SIZES)

        def exact(trie: CodeTrie = trie) -> object:
            return decoder.scores(states, trie).topk(10)

        def beam(width: int, trie: CodeTrie = trie) -> object:
            return beam_search(decoder, trie, states, width, seen)

        times = [milliseconds(lambda width=width: beam(width)) for width in (20, 50, 200)]  # noqa: B023
        whole = f"{milliseconds(exact):7.2f}" if items <= 10_000 else "      -"
        print(f"{items:<7} {whole} {times[0]:8.2f} {times[1]:8.2f} {times[2]:9.2f}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
