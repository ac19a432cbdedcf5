#!/usr/bin/env bash
# Prepares both datasets in both orders of equal times, fits all codes on a CPU, and packs everything.
#
#   prepare.sh OUTPUT ML_1M_ZIP OVERVIEWS_CSV BEAUTY_TXT BEAUTY_TIMES BEAUTY_ITEM_TEXT
#
# Run from the root of the repository. Codes are fitted for each order on its own, because co-occurrence reads
# the order of training events. Vectors are left out of the archive: training reads codes only.
set -euo pipefail
output=$1 ml_1m=$2 overviews=$3 beauty=$4 times=$5 texts=$6
python=${PYTHON:-python}

fit() { # folder, then settings of `recsys sid fit`
    "$python" -m recsys.sid fit --embeddings "$output/vectors" --output "$output/$1" "${@:2}" --overwrite
}

for order in file shuffle; do
    ml=$output/ml-1m-$order
    "$python" -m recsys.prepare movielens --input "$ml_1m" --output "$ml" --ties $order --seed 1 --overwrite
    "$python" -m recsys.sid embed --data "$ml" --items "$overviews" --item-column movie_id --text-column title \
        --text-column genres --text-column overview --output "$output/vectors" --overwrite
    fit "ml-1m-$order/rq3" --balanced
    fit "ml-1m-$order/opq16" --quantizer opq --levels 16
    am=$output/beauty-$order
    "$python" -m recsys.prepare sequences --input "$beauty" --times "$times" --output "$am" \
        --min-user-events 5 --min-item-events 5 --max-history 50 --ties $order --seed 1 --overwrite
    "$python" -m recsys.sid embed --data "$am" --items "$texts" --item-column id --text-column title \
        --text-column categories --output "$output/vectors" --overwrite
    fit "beauty-$order/rq3" --balanced
    fit "beauty-$order/rq4" --balanced --levels 4
    fit "beauty-$order/opq16" --quantizer opq --levels 16
    fit "beauty-$order/opq32" --quantizer opq --levels 32
done
tar -C "$output" -c ml-1m-file ml-1m-shuffle beauty-file beauty-shuffle | xz -9 > "$output/sid-quality.tar.xz"
