"""Times beam search on a GPU: a prefill and a decode alone, whole calls with and without a recorded graph, and the mask
with 20 million items.

    PYTHONPATH=. python experiments/2026-11-28-decoding/bench.py [--items 100000] [--bias | --encoder] [--decoder-layers 2]
        [--profile] [--package] [--mask] [--beams 50 200 512]

Without further arguments the model has 8 HSTU layers of width 1,024 with 8 heads of 128, a decoder of 2 layers with 8
heads and a feed-forward layer of 4,096, bfloat16, random weights, and 4 codes of 256 at random for each item. All
histories are full, and their items are removed. Times are medians in ms of calls that are each waited for; a part is a
replay of its own. `--package` compiles the model, which takes minutes, and times the package alone.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.inference.compiler import compile_graph  # noqa: E402
from recsys.inference.program import Program  # noqa: E402
from recsys.models import build_model  # noqa: E402
from recsys.models.generator import CodeGenerator, _seen  # noqa: E402
from recsys.modules import beam_search  # noqa: E402
from recsys.modules.beam_search import SeenItems, extend_beams  # noqa: E402
from recsys.modules.code_trie import CodeTrie  # noqa: E402
from recsys.ops.beam_step import Beams  # noqa: E402
from recsys.ops.top_k import keys_of  # noqa: E402
from recsys.scoring import recorded  # noqa: E402
from recsys.scoring.padded_inputs import PaddedInputs  # noqa: E402
from recsys.scoring.signature import ScoringGraph, inputs_of, scoring_signature  # noqa: E402
from tests.modules.pipelines import batch_of, pipeline_of, random_rows  # noqa: E402
from tests.tools.bundles import write_codes  # noqa: E402

SHAPES = ((1, 256), (16, 2048))
MASK_ITEMS = 20_000_000
CONFIG = """
data {{ max_history_len: 2048 }}
features {{ name: "item_id"  sides: [HISTORY, CANDIDATE]
  id {{ vocabulary {{ size: {items}  file: "{folder}/item_id.parquet" }} }} }}
model {{ embedding_dim: 1024  precision: BF16
  generator {{ item_feature: "item_id"  bundle: "{folder}/bundle"  seen: REMOVE
    {history}
    decoder {{ num_layers: {layers}  num_heads: 8  ff_dim: 4096 }}
    decoding {{ method: BEAM  beam_size: 200 }} }} }}
predict {{ top_k: 50 }}
"""
MIXER = """preprocessor { uih { positional { origin: START } } }
    mixer { hstu { num_layers: 8  num_heads: 8  qk_dim: 128  activation: UVQK  gate: UGN  BIAS } }"""
ENCODER = "encoder { num_layers: 4  num_heads: 8  ff_dim: 4096 }"


def build(folder: Path, arguments: argparse.Namespace) -> CodeGenerator:
    """The model on the GPU."""
    items = arguments.items
    numbers = np.random.default_rng(0).choice(256**4, items, replace=False)
    codes = np.stack(np.unravel_index(numbers, (256,) * 4), 1)
    pq.write_table(pa.table({"id": pa.array(range(items))}), folder / "item_id.parquet")
    write_codes(folder / "bundle", list(range(items)), codes, 256)
    history = MIXER.replace("BIAS", "bias { num_time_buckets: 64 }" if arguments.bias else "")
    history = ENCODER if arguments.encoder else history
    text = CONFIG.format(items=items, folder=folder, history=history, layers=arguments.decoder_layers)
    torch.manual_seed(0)
    return build_model(pipeline_of(text)).eval().cuda()


def waited(run: Callable[[], object], times: int = 20) -> float:
    """The median time of a call in ms."""
    taken = []
    for _ in range(times + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[3:])


def replay_of(run: Callable[[], object]) -> Callable[[], None]:
    """A recording of `run`, whose result stays alive with it."""
    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return lambda kept=result: graph.replay()


def device_time(run: Callable[[], object], times: int = 50) -> float:
    """The time of a replay in ms, of many without waiting in between."""
    replay = replay_of(run)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    first.record()
    for _ in range(times):
        replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / times


def whole(model: CodeGenerator, rows: int, events: int, beams: Sequence[int]) -> None:
    """Prints the times of one shape for all beams."""
    pipeline, graph = model.pipeline, ScoringGraph(model)
    given = inputs_of(batch_of(pipeline, random_rows(pipeline, [(events, 0)] * rows)), pipeline)
    on_device = [tensor.cuda() for tensor in given]
    named = dict(zip(graph.names, on_device, strict=True))

    def prefill() -> torch.Tensor:
        with model.autocast():
            return model._histories(graph.assemble(named))

    states, seen = prefill(), _seen(graph.assemble(named))
    print(f"batch {rows}, history {events}: prefill {waited(replay_of(prefill)):.3f} ms, unrecorded {waited(prefill):.3f}")
    print("beam   decode  decode, plain steps   call   call unrecorded   replay with padding, from the host")
    for beam in beams:
        model.beam_size = beam

        def decode(beam: int = beam) -> object:
            with model.autocast():
                return model.decode.find(states, beam, seen)

        def call() -> object:
            return graph(*on_device)

        padded = PaddedInputs(pipeline, scoring_signature(pipeline))
        run = recorded.RecordedScoring(graph, padded, torch.device("cuda"), "the search")
        times = [waited(replay_of(decode))]
        usual, beam_search.runs_on = beam_search.runs_on, lambda *_: False
        times.append(waited(replay_of(decode)))
        beam_search.runs_on = usual
        times += [waited(replay_of(call)), waited(call), waited(lambda run=run: run(*given))]
        assert run.num_graphs == 1
        print(f"{beam:4} {times[0]:8.3f} {times[1]:12.3f} {times[2]:14.3f} {times[3]:12.3f} {times[4]:17.3f}", flush=True)


def random_trie(items: int) -> CodeTrie:
    """A trie of random triples of codes of 256, with a digit that tells equal ones apart, built on the GPU."""
    numbers = torch.randint(256**3, (items,), device="cuda").sort().values
    first = torch.searchsorted(numbers, numbers)
    digit = torch.arange(items, device="cuda") - first
    codes = torch.stack([numbers // 256**2, numbers // 256 % 256, numbers % 256, digit], 1)
    return CodeTrie(codes[torch.randperm(items, device="cuda")], (256, 256, 256, int(digit.max()) + 1)).cuda()


def masks(items: int) -> None:
    """Prints the time of a step with and without the trie, for each level."""
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    trie = random_trie(items)
    torch.cuda.synchronize()
    kept = sum(buffer.nbytes for buffer in trie.buffers())
    print(f"trie of {items:,} items: {kept / 1e6:.0f} MB, built in {time.perf_counter() - start:.1f} s, "
          f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB; edges {trie.counts}, most {trie.most_children}")  # fmt: skip
    print("rows level  no mask  kernels  difference  plain  top-k alone   us a step, device time of replays")
    for rows, num_seen in SHAPES:
        pairs = torch.randint(items, (rows * num_seen,), device="cuda")
        seen = beam_search._seen_leaves(trie, SeenItems(torch.arange(rows, device="cuda").repeat_interleave(num_seen), pairs))
        for level in range(trie.levels):
            nodes = 1 if level == 0 else trie.counts[level - 1]
            beams = min(200, nodes)
            node = torch.stack([torch.randperm(nodes, device="cuda")[:beams] for _ in range(rows)])
            given = Beams(-torch.rand(rows, beams, device="cuda"), node)
            logits = torch.randn(rows, beams, trie.sizes[level], device="cuda")
            width = min(200, trie.counts[level])
            place = torch.arange(logits[0].numel(), device="cuda")
            keys = keys_of(torch.randn(rows, beams * trie.most_children[level], device="cuda"), torch.zeros_like(place[:1]))

            def step(level: int = level, logits=logits, given=given, width=width) -> object:
                return extend_beams(logits, given, trie.edges(level), width, seen)

            def unmasked(logits=logits, given=given, width=width, place=place) -> object:
                scores = (logits.log_softmax(2) + given.scores[..., None]).flatten(1)
                return torch.topk(keys_of(scores, place), min(width, scores.shape[1]), dim=1).values

            free, by_kernels = 1e3 * device_time(unmasked), 1e3 * device_time(step)
            usual, beam_search.runs_on = beam_search.runs_on, lambda *_: False
            plain = 1e3 * device_time(step)
            beam_search.runs_on = usual
            alone = 1e3 * device_time(lambda keys=keys, width=width: torch.topk(keys, min(width, keys.shape[1]), dim=1))
            print(f"{rows:4} {level:4} {free:9.1f} {by_kernels:8.1f} {by_kernels - free:9.1f} {plain:9.1f} {alone:9.1f}", flush=True)


def package(model: CodeGenerator, folder: Path) -> None:
    """Compiles the model with a beam of 200 and prints the times of the package, and how often it agrees."""
    pipeline, graph, device = model.pipeline, ScoringGraph(model), torch.device("cuda")
    specs, weights = scoring_signature(pipeline), {}
    example = inputs_of(batch_of(pipeline, random_rows(pipeline, [(30, 0), (40, 0), (7, 0)])), pipeline)
    start = time.perf_counter()
    on_device = tuple(tensor.cuda() for tensor in example)
    compile_graph(graph, specs, on_device, folder / "model.pt2", pipeline, weights)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    on_device = {name: weight.cuda() for name, weight in weights.items()}
    program = Program(folder / "model.pt2", specs, device, weights=on_device, recordable=True)
    for rows, events in SHAPES:
        given = inputs_of(batch_of(pipeline, random_rows(pipeline, [(events, 0)] * rows)), pipeline)
        padded = PaddedInputs(pipeline, scoring_signature(pipeline))
        run = recorded.RecordedScoring(lambda *inputs: program(inputs), padded, device, "the search")
        times = waited(lambda given=given: program(given)), waited(lambda run=run, given=given: run(*given))
        expected, found, replayed = graph(*(t.cuda() for t in given)), program(given), run(*given)
        agreement = [(items == expected[1]).float().mean().item() for _, items in (found, replayed)]
        print(f"batch {rows}, history {events}: package {times[0]:.3f} ms, recorded {times[1]:.3f} ms, graphs "
              f"{run.num_graphs}, share of places with the item of eager mode {agreement}", flush=True)  # fmt: skip
        profile(lambda given=given: program(given))


def profile(run: Callable[[], object]) -> None:
    """Prints the kernels of a call."""
    for _ in range(2):
        run()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        run()
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    total = math.fsum(event.device_time for event in kernels)
    print(f"{len(kernels)} kernels, {total / 1e3:.3f} ms")
    by_name: dict[str, list[float]] = {}
    for event in kernels:
        by_name.setdefault(event.name[:110], []).append(event.device_time)
    for name, times in sorted(by_name.items(), key=lambda entry: -sum(entry[1]))[:45]:
        print(f"{sum(times):8.1f} us {len(times):4} x {name}")


def main() -> None:
    """Measures what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--encoder", action="store_true")
    parser.add_argument("--decoder-layers", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--package", action="store_true")
    parser.add_argument("--mask", action="store_true", help="the mask, too")
    parser.add_argument("--beams", type=int, nargs="*", default=[50, 200, 512], help="none measures no calls")
    arguments = parser.parse_args()
    recorded.MOST_ENTRIES = 2**40
    print(torch.cuda.get_device_name(), torch.__version__)
    with torch.no_grad():
        if arguments.mask:
            masks(MASK_ITEMS)
        if not arguments.beams:
            return
        with tempfile.TemporaryDirectory() as folder:
            model = build(Path(folder), arguments)
            if arguments.package:
                package(model, Path(folder))
                return
        print({name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()})
        for rows, events in SHAPES:
            whole(model, rows, events, arguments.beams)
        if arguments.profile:
            model.beam_size, graph, pipeline = 200, ScoringGraph(model), model.pipeline
            rows = random_rows(pipeline, [(SHAPES[0][1], 0)] * SHAPES[0][0])
            inputs = [tensor.cuda() for tensor in inputs_of(batch_of(pipeline, rows), pipeline)]
            profile(lambda: graph(*inputs))


if __name__ == "__main__":
    main()
