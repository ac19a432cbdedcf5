#!/usr/bin/env bash
# Trains a config of the bundled MovieLens sample in one reading of the protocol and evaluates it on test.
#   run.sh DATA RUNS CONFIG ORDER QUERY_TIME SEED      e.g. data runs retrieval shuffle LAST_EVENT 1
# DATA is the folder that prepare.sh made. The metrics go to RUNS/CONFIG-ORDER-QUERY_TIME-SEED.{remove,keep}.json.
# With GPUS=N in the environment, the GPU is the one that a hash of the run's name chooses. Run from the root.
set -euo pipefail
data="$1/$4" folder="$2/$3-$4-$5-$6"
case "$3" in
generator | parallel) family=generator ;;
*) family=retriever ;;
esac
[ -s "$folder.keep.json" ] && exit 0
if [ -n "${GPUS:-}" ]; then
    CUDA_VISIBLE_DEVICES=$(($(cksum <<<"$folder" | cut -d' ' -f1) % GPUS))
    export CUDA_VISIBLE_DEVICES
fi
mkdir -p "$2"
sets=(--set train.seed="$6" --set model.$family.preprocessor.uih.query_time="$5")
for split in train validation test; do
    sets+=(--set "data.$split.parquet.paths=[\"$data/$split.parquet\"]")
done
sets+=(--set "data.vocabulary_dir=\"$data/vocabulary\"")
case "$3" in
generator) sets+=(--set "model.generator.bundle=\"$data/bundle\"") ;;
parallel) sets+=(--set "model.generator.bundle=\"$data/opq\"") ;;
two_tower) sets+=(--set "data.item_file=\"$data/items.parquet\"") ;;
esac
{
    python -m recsys.train --config "configs/movielens_small_$3.config" --run-dir "$folder" "${sets[@]}"
    python -m recsys.evaluate --run-dir "$folder"
    cp "$folder/test_metrics.json" "$folder.remove.json"
    python -m recsys.evaluate --run-dir "$folder" --set model.$family.seen=KEEP
    cp "$folder/test_metrics.json" "$folder.keep.json"
} >"$folder.log" 2>&1
