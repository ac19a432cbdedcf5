#!/usr/bin/env bash
# On RANKS GPUs of one host: a full softmax over 10 million items divided over the ranks, a row-wise table of a billion rows of width
# 64, and a state of 101 GB that is written while training goes on, and read again.
#   large.sh RUNS RANKS [SMALL]       with SMALL=1000 every size is divided by 1,000, for a try on CPUs
# ONLY="softmax state" leaves out the table of a billion rows, which two GPUs have no room for; SECONDS_OF_STATE is how long the first
# state may take to be written.
# Run from the root of the repository.
set -uo pipefail
runs="$1" ranks="$2" small="${3:-1}"
here=experiments/2026-11-28-several-gpus
mkdir -p "$runs"
trap 'pkill -9 -f "recsys.train .*--run-dir $runs/"' EXIT # also when this script is stopped

# Trains without end, and kills all processes when COMMAND succeeds or the time is over.
train() { # SECONDS COMMAND NAME CONFIG OVERRIDE ...
    local seconds="$1" reached="$2" name="$3" config="$4" sets=() began=$SECONDS
    shift 4
    for override in "$@"; do sets+=(--set "$override"); done
    : >"$runs/$name.log"
    setsid torchrun --standalone --nproc-per-node "$ranks" -m recsys.train --config "$here/$config" --run-dir "$runs/$name" \
        --set train.num_steps=1000000 "${sets[@]}" >>"$runs/$name.log" 2>&1 &
    local group=$!
    until eval "$reached" || [ $((SECONDS - began)) -ge "$seconds" ] || ! kill -0 "$group" 2>/dev/null; do sleep 0.5; done
    echo "$name: $((SECONDS - began)) s"
    nvidia-smi --query-gpu=memory.used --format=csv,noheader 2>/dev/null | xargs
    pkill -9 -f "recsys.train .*--run-dir $runs/$name "
    wait "$group"
    grep -E "stood still|INFO +[0-9]+/|esum|rror|^item_id" "$runs/$name.log" | cut -c1-160 | tail -n 12
}
step() { echo "grep -Eq 'INFO +$1/' $runs/$2.log"; }

wanted() { [[ " ${ONLY:-softmax billion state} " == *" $1 "* ]]; }

if wanted softmax; then
    python "$here/rows.py" "$runs/many-items" --items $((10000000 / small))
    train 90 "$(step 60 softmax)" softmax softmax.config train.checkpoint.every_steps=100000 \
        "data.train.parquet.paths=[\"$runs/many-items/train.parquet\"]" "data.vocabulary_dir=\"$runs/many-items/vocabulary\""
fi
if wanted billion; then
    train 120 "$(step 60 billion)" billion table.config "features[0].id.hash.num_buckets=$((1000000000 / small))" \
        train.checkpoint.every_steps=100000
fi
wanted state || exit 0
state=("features[0].id.hash.num_buckets=$((390000000 / small))" train.log_every_steps=50)
df -h "$runs" | tail -n 1
train "${SECONDS_OF_STATE:-280}" "[ -e $runs/state/checkpoints/step-00000100 ]" state table.config "${state[@]}" train.checkpoint.every_steps=100
date +%T
du -s --block-size=1M "$runs/state/checkpoints"
find "$runs/state/checkpoints" -printf '%TT %s %f\n' | sort | sed -n '1,3p;$p'
train 150 "$(step 200 state)" state table.config "${state[@]}" train.checkpoint.every_steps=100000
rm -rf "$runs/state"
