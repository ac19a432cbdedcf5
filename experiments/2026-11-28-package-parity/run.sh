#!/usr/bin/env bash
# Trains a ranker on KuaiRand-Pure and a retriever on MovieLens-1M for some hundred steps, exports each in FP32 and BF16 and
# with tables in INT8 and INT4, evaluates run and packages on the whole test split, and prints one table.
#   run.sh DATA RUNS        DATA has kuairand/ and ml-1m/, as recsys.prepare makes them
# In the environment: ONLY="kuairand" takes one of the two, KINDS="BF16 run" takes some packages and the runs, JOBS is the number of exports at a time, STEPS_KUAIRAND and
# STEPS_ML_1M are the lengths of the trainings, SET_KUAIRAND and SET_ML_1M further overrides, split at spaces. Every command
# has a log in RUNS. Run from the root of the repository.
set -euo pipefail
export DATA="$1" RUNS="$2"
here="$(dirname "$0")"
mkdir -p "$RUNS"

train() {
    local name="$1" config="$2" steps="$3" folder="$DATA/$1" sets=()
    for split in train validation test; do
        sets+=(--set "data.$split.parquet.paths=[\"$folder/$split.parquet\"]")
    done
    for override in $4; do
        sets+=(--set "$override")
    done
    python -m recsys.train --config "$config" --run-dir "$RUNS/$name" "${sets[@]}" \
        --set "data.vocabulary_dir=\"$folder/vocabulary\"" --set train.num_epochs= --set "train.num_steps=$steps" \
        --set 'train.evaluation={}' --set data.num_workers=0 >"$RUNS/$name.train.log" 2>&1
}

# Evaluates the run in both precisions, or makes and evaluates a package.
measure() {
    local name="$1" kind="$2" run="$RUNS/$1" package="$RUNS/$1-$2" sets=(--set model.precision=FP32)
    case "$kind" in
    run)
        for precision in FP32 BF16; do
            python -m recsys.evaluate --run-dir "$run" --set "model.precision=$precision" \
                >"$RUNS/$name.run-$precision.txt" 2>&1
        done
        return
        ;;
    BF16) sets[1]=model.precision=BF16 ;;
    INT*) sets+=(--set "export.tables={memory_map_above_bytes: 0 dtype: $kind}") ;;
    esac
    python -m recsys.export --run-dir "$run" --output "$package" "${sets[@]}" >"$RUNS/$name.$kind.export.log" 2>&1
    python -m recsys.evaluate --package "$package" --run-dir "$run" >"$RUNS/$name.$kind.txt" 2>&1
}
export -f measure

wanted=(${ONLY:-kuairand ml-1m})
for name in "${wanted[@]}"; do
    case "$name" in
    kuairand) train kuairand configs/kuairand_ranking.config "${STEPS_KUAIRAND:-600}" "${SET_KUAIRAND:-}" & ;;
    ml-1m) train ml-1m configs/ml_1m_hstu_large.config "${STEPS_ML_1M:-400}" "${SET_ML_1M:-}" & ;;
    esac
done
wait
jobs=()
for name in "${wanted[@]}"; do
    for kind in ${KINDS:-FP32 BF16 INT8 INT4 run}; do
        jobs+=("$name" "$kind")
    done
done
printf '%s\n' "${jobs[@]}" | xargs -P "${JOBS:-10}" -n 2 bash -c 'measure "$@"' measure || echo "a command failed; see the logs in $RUNS"
python "$here/table.py" "$RUNS" "${wanted[@]}"
