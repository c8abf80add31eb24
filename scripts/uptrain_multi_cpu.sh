#!/bin/sh
# Run a command of `uptrain` in several processes on the CPUs of this machine:
#     PROCESSES=2 scripts/uptrain_multi_cpu.sh run MODEL --data CACHE --alpha 0.05 --out RUN
#     PROCESSES=2 scripts/uptrain_multi_cpu.sh resume RUN
# `accelerate launch --cpu --num_processes 2` starts only one process, without a warning: accelerate has no launcher for
# several processes on the CPUs of one machine. Its launcher for replicas works if ACCELERATE_USE_CPU is set.
set -eu
configs=$(cd "$(dirname "$0")" && pwd)/launch/accelerate
export ACCELERATE_USE_CPU=true
PROCESSES=${PROCESSES:-}
case $PROCESSES in
    "" | *[!0-9]* | 0*)
        echo "Error: PROCESSES=$PROCESSES is not a number of processes; give 2, for example." >&2
        exit 2 ;;
esac
# torchrun would give each process one thread.
threads=$(($(nproc 2>/dev/null || sysctl -n hw.ncpu) / PROCESSES))
if [ "$threads" -lt 1 ]; then threads=1; fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
exec python -m uptrain.distributed.launcher --config_file "$configs/ddp.yaml" --num_processes "$PROCESSES" \
    --main_process_port 0 -m uptrain "$@"
