"""Says where a generator ranks items that it was not trained on, and what would have found them.

    python analyze.py RUN [RUN ...] --data DATA --vectors VECTORS [--json FILE]

RUN are run folders of `recsys train` on DATA, a folder of `recsys prepare cold-start`; VECTORS is what `recsys sid
embed` made for it. All items are scored for the test rows, whose targets were held out, and for validation rows, whose
targets were not; items of the history are left out. Prints hit rates of the test rows in four lists: the whole
catalogue; the items that training has not seen, alone; the catalogue with a bonus for these, the largest that keeps
95, 90 or 80 % of NDCG@10 on validation; and the catalogue after subtracting an item's mean score over validation rows,
how popular the model takes it to be. `nearest` ranks by the cosine of an item's vector with the mean of those of the
newest events, without any training.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from pyarrow import parquet

from recsys import config
from recsys.models import layout_rule
from recsys.data.loader import Loader
from recsys.training.distributed import process_group
from recsys.training.run import load_model

KEPT = (0.95, 0.9, 0.8)
CUTS = (1, 5, 10, 20)
EVENTS = (1, 3, 10)


def scores_of(run, split, processes, limit):
    """Scores [rows, items] with -inf for items of the history, the targets [rows], and the items of the histories."""
    pipeline = config.prepare(str(run / "config.resolved"), ["model.generator.decoding={method: EXACT}"]).pipeline
    model = load_model(pipeline, run, processes, "best").model.eval()
    loader = Loader.open(pipeline, split, layout_rule(pipeline), rank=0, world_size=1, mode="evaluate")
    parts, targets, histories = [], [], []
    with torch.no_grad():
        for batch in loader.first(limit):
            batch = batch.to(processes.device)
            with model.autocast():
                states = model._histories(batch)
                writer = model.decode
                whole = (
                    torch.cat(list(writer.score_in_parts(states)))
                    if hasattr(writer, "score_in_parts")
                    else writer.score_items(states)
                )
            rows = torch.repeat_interleave(
                torch.arange(len(whole), device=whole.device), batch.seen_layout.lengths
            )
            known = batch.seen > 0
            whole[rows[known], batch.seen[known] - 1] = -torch.inf
            parts.append(whole.cpu())
            targets.append(batch.ids[model.candidates].values().cpu() - 1)
            items = batch.ids[model.history].values().cpu() - 1
            histories += [each.numpy() for each in items.split(batch.uih_lengths.tolist())]
    return torch.cat(parts), torch.cat(targets), histories


def hit_rates(scores, targets):
    """Hit rates at CUTS; ties count against the target."""
    own = scores.gather(1, targets[:, None])
    ranks = (scores >= own).sum(1)
    found = own[:, 0] > -torch.inf
    return {k: ((ranks <= k) & found).double().mean().item() for k in CUTS}


def ndcg(scores, targets):
    own = scores.gather(1, targets[:, None])
    ranks = (scores >= own).sum(1)
    return torch.where((ranks <= 10) & (own[:, 0] > -torch.inf), 1 / (ranks + 1).double().log2(), 0).mean().item()


def largest_bonus(scores, targets, new, least):
    """The largest bonus, by bisection, with which NDCG@10 of trained items is at least `least`."""
    low, high = 0.0, 200.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if ndcg(scores + middle * new, targets) >= least else (low, middle)
    return low


def only(scores, allowed):
    return torch.where(allowed[None], scores, -torch.inf)


def nearest(vectors, histories, seen, count):
    """Cosines with the mean vector of the newest `count` events."""
    means = np.stack([vectors[items[-count:]].mean(0) if len(items) else 0 * vectors[0] for items in histories])
    cosines = torch.from_numpy(means @ vectors.T)
    return torch.where(seen, -torch.inf, cosines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--batches", type=int, default=8, help="validation batches")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    vocabulary = parquet.read_table(flags.data / "vocabulary" / "item_id.parquet")
    new = torch.from_numpy(vocabulary["count"].to_numpy() == 0)
    record = {"new items": int(new.sum()), "items": len(new)}

    def tell(run, name, scores, targets, **more):
        record[f"{run}: {name}"] = hit_rates(scores, targets) | more
        cells = " ".join(f"HR@{k} {value:.4f}" for k, value in hit_rates(scores, targets).items())
        print(f"{run}: {name}: {cells} {' '.join(f'{key} {value:.4f}' for key, value in more.items())}", flush=True)

    with process_group() as processes:
        for index, run in enumerate(flags.runs):
            warm, warm_targets, _ = scores_of(run, "validation", processes, flags.batches)
            cold, targets, histories = scores_of(run, "test", processes, None)
            before = ndcg(warm, warm_targets)
            tell(run.name, "whole catalogue", cold, targets, validation=before)
            tell(run.name, "new items alone", only(cold, new), targets)
            finite = torch.where(warm == -torch.inf, torch.nan, warm)
            mean = finite.nanmean(0)
            for share in (0.5, 1.0):
                tell(
                    run.name, f"less {share} of the item's mean", cold - share * mean, targets,
                    validation=ndcg(warm - share * mean, warm_targets),
                )  # fmt: skip
                tell(run.name, f"less {share} of the item's mean, new items alone", only(cold - share * mean, new), targets)
            for kept in KEPT:
                bonus = largest_bonus(warm, warm_targets, new.float(), kept * before)
                tell(
                    run.name, f"bonus that keeps {kept:.0%}", cold + bonus * new.float(), targets, bonus=bonus,
                    validation=ndcg(warm + bonus * new.float(), warm_targets),
                )  # fmt: skip
            if index == 0 and flags.vectors:
                table = parquet.read_table(flags.vectors / "embeddings.parquet")
                values = np.stack(table["embedding"].to_numpy(zero_copy_only=False)).astype(np.float32)
                place = {item: at for at, item in enumerate(table["item_id"].to_pylist())}
                values = values[[place[item] for item in vocabulary["id"].to_pylist()]]
                values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-8)
                for count in EVENTS:
                    scores = nearest(values, histories, cold == -torch.inf, count)
                    tell("nearest", f"{count} events, whole catalogue", scores, targets)
                    tell("nearest", f"{count} events, new items alone", only(scores, new), targets)
    if flags.json:
        flags.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
