#!/bin/sh
# Run a command of `uptrain` on every GPU of this machine (of those in CUDA_VISIBLE_DEVICES, if it is set):
#     scripts/uptrain_multi_gpu.sh run MODEL --data CACHE --alpha 0.05 --out RUN
#     scripts/uptrain_multi_gpu.sh resume RUN
# GPUS=4 takes that many. LAYOUT=ddp keeps whole replicas instead of shards: faster where 16 bytes a parameter fit.
set -eu
configs=$(cd "$(dirname "$0")" && pwd)/launch/accelerate
gpus=${GPUS:-$(python -c 'import torch; print(torch.accelerator.device_count())')}
layout=${LAYOUT:-fsdp2}
if [ "$gpus" -eq 0 ]; then
    echo "Error: this machine has no GPU; start \`uptrain\` as it is, or scripts/uptrain_multi_cpu.sh." >&2
    exit 2
fi
if [ "$gpus" -eq 1 ]; then layout=single; fi
# A checkpoint may take longer to save than the 30 seconds that stopped processes are given otherwise.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
exec accelerate launch --config_file "$configs/$layout.yaml" --num_processes "$gpus" --main_process_port 0 \
    -m uptrain "$@"
