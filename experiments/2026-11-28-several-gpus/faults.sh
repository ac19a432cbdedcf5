#!/usr/bin/env bash
# Trains the retriever of the bundled sample with sharded tables on MANY ranks: undisturbed, with a rank killed, and with another
# number of ranks after each third. Prints whether losses are equal, and the metrics of each state on 1 to MANY ranks.
#   faults.sh RUNS MANY STEPS       e.g. runs/faults 4 120
# Run from the root of the repository. STEPS is divisible by 3.
set -uo pipefail
runs="$1" many="$2" steps="$3" half=$(($2 / 2)) third=$(($3 / 3))
mkdir -p "$runs"

train() { # RANKS FOLDER STEPS [TORCHRUN_FLAG ...]
    local ranks="$1" folder="$runs/$2" until="$3"
    shift 3
    torchrun --nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node "$ranks" "$@" -m recsys.train \
        --config configs/movielens_small_retrieval.config --run-dir "$folder" --set train.num_steps="$until" --set train.num_epochs= \
        --set model.embedding_dim=64 --set model.retriever.mixer.hstu.qk_dim=64 --set model.embedding.placement=SHARDED \
        --set data.batch_size=16 --set train.evaluation= --set train.log_every_steps=1 --set train.checkpoint.every_steps=10 \
        --set train.checkpoint.keep=30 >>"$folder.log" 2>&1
    echo "$folder: $ranks ranks to step $until, exit code $?"
}

evaluate() { # RANKS FOLDER
    torchrun --nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node "$1" \
        -m recsys.evaluate --run-dir "$runs/$2" --checkpoint newest >>"$runs/$2.evaluate.log" 2>&1
    echo "$runs/$2 on $1 ranks: $(tr -d '\n ' <"$runs/$2/test_metrics.json" | grep -o '"metrics".*')"
}

killed() {
    train "$many" killed "$steps" --max-restarts 3 &
    until [ -e "$runs/killed/checkpoints/$(printf 'step-%08d' "$third")" ]; do sleep 0.05; done
    local rank
    rank="$(pgrep -f "recsys.train .*--run-dir $runs/killed " | xargs -r ps -o pid=,args= -p | grep -v torchrun | tail -1)"
    kill -9 "$(awk '{print $1}' <<<"$rank")"
    echo "killed a rank behind step $third"
    wait
}

resharded() { # FOLDER RANKS RANKS RANKS
    train "$2" "$1" "$third" && train "$3" "$1" $((2 * third)) && train "$4" "$1" "$steps"
}

train "$many" undisturbed "$steps" &
killed &
resharded "many-half-many" "$many" "$half" "$many" &
resharded "one-two-one" 1 2 1 &
wait
python - "$runs" <<'PYTHON'
import json, sys
from pathlib import Path
def losses(name):
    lines = map(json.loads, (Path(sys.argv[1]) / name / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
undisturbed, killed = losses("undisturbed"), losses("killed")
print("killed and undisturbed:", "equal losses at all" if killed == undisturbed else "DIFFERENT losses among", len(undisturbed), "steps")
for name in ("undisturbed", "many-half-many", "one-two-one"):
    made = losses(name)
    print(name, "loss at every tenth of the steps:", [round(made[step], 4) for step in sorted(made)[:: max(1, len(made) // 10)]])
PYTHON
for ranks in 1 "$half" "$many"; do
    evaluate "$ranks" many-half-many &
    evaluate "$ranks" one-two-one
    wait
done
