#!/bin/sh
# From agents to a trained model and the viewer, every job on the Ray cluster, the lake in the bucket: cluster.py runs it.
set -eu
out=${OUT:-out}

python players.py
trajlake score reward.py:soon --executor ray --workers 2
trajlake credit gigpo --score soon --executor ray --workers 2
trajlake init-model --out "$out/fresh" --vocabulary 512
trajlake train --out "$out/run" --model "$out/fresh" --loss awr --lr 4e-3
trajlake rescore "$out/run/final" --executor ray --workers 2
trajlake compact --executor ray --workers 2
trajlake sql "SELECT kind, count(*) AS jobs, round(sum(seconds), 1) AS seconds FROM job_runs WHERE status = 'succeeded' GROUP BY kind ORDER BY kind"
# The cluster and its bucket end with this script, so the viewer is its last command.
test "${VIEW:-yes}" = no || exec trajlake view --no-browser
