#!/usr/bin/env bash
# Prepares the bundled MovieLens sample with equal times shuffled, and the codes of both orders, into DATA/ORDER.
#   experiments/2026-11-28-small-protocol/prepare.sh ml-latest-small DATA
# The first argument is the folder of the original release. Run from the root of the repository; needs faiss-cpu.
set -euo pipefail
release="$1"
data="$2"
mkdir -p "$data"
cp -r tests/data/movielens "$data/file"
python -m recsys.prepare movielens --input "$release" --output "$data/shuffle" --ties shuffle --seed 1
for order in file shuffle; do
    python -m recsys sid embed --data "$data/$order" --output "$data/$order/vectors"
    python -m recsys sid fit --embeddings "$data/$order/vectors" --output "$data/$order/bundle" --balanced
    python -m recsys sid fit --embeddings "$data/$order/vectors" --output "$data/$order/opq" --quantizer opq --levels 16
done
