#!/usr/bin/env bash
# Prepares a dataset in an order of equal times and fits its codes on a CPU; `run.py pack` packs both.
#
#   prepare.sh OUTPUT beauty-ORDER BEAUTY_TXT BEAUTY_TIMES ITEM_TEXT    ORDER: file or shuffle
#   prepare.sh OUTPUT beauty-cold2 ITEM_TEXT    after beauty-file: 2 % of the items held out; cold5: 5 %
#   prepare.sh OUTPUT ml-1m-ORDER ML_1M_ZIP OVERVIEWS_CSV
#
# Run from the root of the repository; what is done is not repeated. Codes are fitted for each order on its own,
# because co-occurrence reads the order of training events. The archive has no vectors: training reads codes only.
set -euo pipefail
output=$1 name=$2
python=${PYTHON:-python}
data=$output/$name vectors=$output/vectors-$name ties=(--ties "${name##*-}" --seed 1)

once() { # the folder that a command makes, then the command
    [ -e "$1" ] || "$python" -m "${@:2}" --output "$1"
}
fit() { # folder, then settings of `recsys sid fit`
    once "$data/$1" recsys.sid fit --embeddings "$vectors" "${@:2}"
}

case $name in
beauty-cold*)
    once "$data" recsys.prepare cold-start --input "$output/beauty-file" --share "0.0${name##*cold}"
    once "$vectors" recsys.sid embed --data "$data" --items "$3" --item-column id --text-column title \
        --text-column categories
    ;;
beauty-*)
    once "$data" recsys.prepare sequences --input "$3" --times "$4" --min-user-events 5 --min-item-events 5 \
        --max-history 50 "${ties[@]}"
    once "$vectors" recsys.sid embed --data "$data" --items "$5" --item-column id --text-column title \
        --text-column categories
    ;;
ml-1m-*)
    once "$data" recsys.prepare movielens --input "$3" "${ties[@]}"
    once "$vectors" recsys.sid embed --data "$data" --items "$4" --item-column movie_id --text-column title \
        --text-column genres --text-column overview
    ;;
esac
fit rq3 --balanced
fit rq4 --balanced --levels 4
fit opq16 --quantizer opq --levels 16
