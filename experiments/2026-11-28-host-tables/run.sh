#!/usr/bin/env bash
# On one GPU: steps of a model with a table of 300 million rows of width 64 in the GPU's memory, in the host's with a cache, and in the
# host's; then a run with a state of 50 GB that is saved while training goes on.
#   run.sh RUNS [SMALL]        with SMALL=1000 every table is divided by 1,000, for a try; only the state runs on a CPU
# ONLY="tables" or "state" runs a part. Run from the root of the repository.
set -uo pipefail
runs="$1" small="${2:-1}"
config=experiments/2026-11-28-several-gpus/table.config
mkdir -p "$runs"
wanted() { [[ " ${ONLY:-tables state} " == *" $1 "* ]]; }
rows() { echo "features[0].id.hash.num_buckets=$(($1 / small))"; }

if wanted tables; then
    for kernel in FUSED FUSED_UVM_CACHING FUSED_UVM; do
        echo "== $kernel"
        timeout -s KILL "${SECONDS_A_TABLE:-90}" python experiments/2026-11-28-recorded-steps/steps.py $config --steps "${STEPS:-400}" --set "$(rows 300000000)" \
            --set train.sharding.kernel=$kernel --set data.num_workers=8 --set data.train.synthetic.num_rows=131072 2>&1 |
            grep -E " ms|rror" | tail -n 3
    done
fi
if wanted state; then
    rm -rf "$runs/state"
    timeout -s KILL "${SECONDS_OF_STATE:-170}" python -m recsys.train --config $config --run-dir "$runs/state" --set "$(rows 195000000)" \
        --set train.num_steps=1000000 --set train.log_every_steps=500 --set data.num_workers=8 \
        --set "train.checkpoint.every_steps=${EVERY:-10000}" >"$runs/state.log" 2>&1
    grep -E "stood still|rror|written|^item_id" "$runs/state.log" | cut -c1-160
    du -s --block-size=1M "$runs/state/checkpoints"
    find "$runs/state/checkpoints" -printf '%TT %s %f\n' | sort | tail -n 12
fi
