#!/usr/bin/env bash
# Records processes.trace with `plimsoll run --record`: four kinds of processes on this machine, each in a cgroup of its own.
# usage: record.sh PLIMSOLL [DURATION]   (needs root, cgroup v1 or v2 and python3; 12m; a fifth of a CPU)
set -euo pipefail
plimsoll=$1 duration=${2:-12m}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
parent=plimsoll-shapes
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then roots=(/sys/fs/cgroup); else roots=(/sys/fs/cgroup/{cpu,cpuacct,memory}); fi
pids=()
finish() {
    for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
    sleep 1
    for root in "${roots[@]}"; do
        for name in service batch spiky build ""; do rmdir "$root/$parent/$name" 2>/dev/null || true; done
    done
    rm -rf "$work"
}
trap finish EXIT

start() { # NAME COMMAND...
    local name=$1
    shift
    for root in "${roots[@]}"; do mkdir -p "$root/$parent/$name"; done
    # shellcheck disable=SC2016
    setsid nice -n 10 bash -c 'for root in '"${roots[*]}"'; do echo $$ >"$root/'"$parent/$name"'/cgroup.procs"; done; exec "$@"' _ "$@" &
    pids+=($!)
}

# A service: requests at random times, whose rate drifts; each computes for some milliseconds.
start service python3 "$here/processes.py" service
# Batch work: compresses files, with reading and pauses between them.
start batch python3 "$here/processes.py" batch
# Idle, and busy for one to two minutes now and then.
start spiky python3 "$here/processes.py" spiky
# A build: many short compilations, then a long one, then a pause.
start build python3 "$here/processes.py" build

cat >"$work/policy.yaml" <<'P'
apiVersion: ensurance.crane.io/v1alpha1
kind: NodeQOS
metadata: {name: shapes}
spec:
  rules:
  - name: cpu
    avoidanceThreshold: 3
    restoreThreshold: 3
    actionName: nothing
    strategy: Preview
    metricRule: {name: cpu_total_utilization, value: 99}
---
apiVersion: ensurance.crane.io/v1alpha1
kind: AvoidanceAction
metadata: {name: nothing}
spec: {coolDownSeconds: 30}
P
"$plimsoll" run --policies "$work/policy.yaml" --pods-under "$parent" --preview --period 10s --state-dir "$work/state" \
    --for "$duration" --record "$work/trace" >/dev/null
# Only what shapes need: each pod's counter of CPU.
python3 "$here/processes.py" strip <"$work/trace" >"$here/processes.trace"
