#!/bin/sh
# Run a command of `uptrain` on every GPU of this machine (or those in CUDA_VISIBLE_DEVICES):
#     scripts/uptrain_multi_gpu.sh run MODEL --data CACHE --alpha 0.05 --out RUN
#     scripts/uptrain_multi_gpu.sh resume RUN
# GPUS=4 uses 4 of them. LAYOUT=ddp uses replicas instead of shards: faster, if `uptrain plan` shows that DDP fits.
set -eu
configs=$(cd "$(dirname "$0")" && pwd)/launch/accelerate
layout=${LAYOUT:-fsdp2}
case ${GPUS:-} in
    *[!0-9]*)
        echo "Error: GPUS=$GPUS is not a number of GPUs; give 4, for example." >&2
        exit 2 ;;
esac
case $layout in
    ddp | fsdp2) ;;
    *)
        echo "Error: LAYOUT=$layout is unknown; choose ddp or fsdp2." >&2
        exit 2 ;;
esac
available=$(python -c 'import torch; print(torch.accelerator.device_count())')
gpus=${GPUS:-$available}
if [ "$available" -eq 0 ]; then
    echo "Error: this machine has no GPU; start \`uptrain\` as it is, or scripts/uptrain_multi_cpu.sh." >&2
    exit 2
fi
if [ "$gpus" -eq 0 ] || [ "$gpus" -gt "$available" ]; then
    echo "Error: GPUS=$gpus, but torch finds $available; give 1 to $available, or leave it out to use all." >&2
    exit 2
fi
# accelerate does not pass signals on to a single process, which then would not save.
if [ "$gpus" -eq 1 ]; then exec python -m uptrain "$@"; fi
exec python -m uptrain.distributed.launcher --config_file "$configs/$layout.yaml" --num_processes "$gpus" \
    --main_process_port 0 -m uptrain "$@"
