#!/usr/bin/env bash
# Trains a large model for a few steps, exports it, and puts load on a server that has the package.
#   large.sh RUNS [PORT]
# In the environment: WIDTH, LAYERS, HEADS, EVENTS, CANDIDATES, PROCESSES (as in "1 2"), RATES, SECONDS_A_RATE. Run from the root of the repository.
set -euo pipefail
runs="$1" port="${2:-8127}" here="$(dirname "$0")"
width="${WIDTH:-1024}" layers="${LAYERS:-8}" heads="${HEADS:-8}" events="${EVENTS:-2048}" candidates="${CANDIDATES:-256}"
mkdir -p "$runs"
python -m recsys.train --config configs/quickstart.config --run-dir "$runs/run" \
    --set train.num_epochs= --set train.num_steps=5 --set 'train.evaluation={}' --set data.num_workers=0 \
    --set "data.max_history_len=$events" --set "data.max_candidates=$candidates" --set "model.embedding_dim=$width" \
    --set "model.precision=${PRECISION:-BF16}" \
    --set "model.ranker.mixer.hstu={num_layers: $layers num_heads: $heads qk_dim: $((width / heads))}" \
    >"$runs/train.log" 2>&1
started=$(date +%s)
python -m recsys.export --run-dir "$runs/run" --output "$runs/export" >"$runs/export.log" 2>&1
echo "exported in $(($(date +%s) - started)) s"
python "$here/long_requests.py" write "$runs/requests.parquet" --events "$events" --candidates "$candidates"
python "$here/long_requests.py" time "$runs/requests.parquet" --package "$runs/export"
server=
trap 'kill $server 2>/dev/null || true' EXIT
for processes in ${PROCESSES:-1}; do
    python -m recsys.serve --package "$runs/export" --port "$port" --processes "$processes" >"$runs/serve-$processes.log" 2>&1 &
    server=$!
    for _ in $(seq 120); do
        python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/readyz')" 2>/dev/null && break
        kill -0 $server || { tail -n 5 "$runs/serve-$processes.log"; exit 1; }
        sleep 1
    done
    for body in "" --arrow; do
        echo "processes: $processes, bodies: ${body:-JSON}"
        python scripts/bench_http.py --port "$port" --input "$runs/requests.parquet" --seconds "${SECONDS_A_RATE:-5}" \
            --rate ${RATES:-5 20 40 80 120 160} $body
    done
    python "$here/long_requests.py" stages "http://127.0.0.1:$port/metrics"
    kill -TERM $server
    wait $server && echo "the server ended with exit code 0"
done
