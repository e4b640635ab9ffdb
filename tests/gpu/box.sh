#!/bin/bash
# On a bare GPU box, in a folder that holds the packed folders .gpu/1 .. .gpu/N and .gpu/src/klbench.tar:
#
#     bash .gpu/src/box.sh unpack 3                         # a packed folder into /tmp/site
#     bash .gpu/src/box.sh rows ROW ...                     # rows of the list; results go to $OUT
#     bash .gpu/src/box.sh call 1 [--deadline SECONDS ...]  # one of the calls that together make the whole list
#
# klbench and its tests come from the tar (git archive HEAD klbench tests pyproject.toml) and go to /tmp/klb;
# the tar names its commit, and each result keeps it. Results that are there already are not made again, but
# those of another commit are.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
case $1 in
unpack)
  bash "$here/$2/unpack.sh" "$here/$2"
  ;;
rows | call)
  [ "$1" = rows ] && shift || { set -- --call "$2" "${@:3}"; }
  rm -rf /tmp/klb && mkdir -p /tmp/klb && tar -xf "$here/src/klbench.tar" -C /tmp/klb
  cd /tmp/klb || exit 2
  export PYTHONPATH=/tmp/klb:/tmp/site HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
  export KLBENCH_CACHE=/tmp/klbench-cache
  commit=$(python3 -c 'import sys, tarfile
with tarfile.open(sys.argv[1]) as tar:
    print(tar.pax_headers.get("comment", ""))' "$here/src/klbench.tar")
  python3 -m tests.gpu.run --out /tmp/rows --models /tmp/models --commit "$commit" "$@"
  code=$?
  # What is worth keeping and small: documents, reports, logs, events; no traces, weights or columns.
  cd /tmp/rows && find . -type f \( -name '*.json' -o -name '*.md' -o -name '*.txt' -o -name '*.jsonl' \
    -o -name '*.log' \) -size -6M ! -path '*/traces/*' ! -name '*prompts*' -print0 |
    tar --null -czf "${OUT:-/tmp}/rows.tgz" -T -
  exit $code
  ;;
esac
