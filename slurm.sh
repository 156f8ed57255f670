#!/bin/bash
# Runs a stage on a Slurm cluster, by default on one machine with four GPUs:
#
#     sbatch slurm.sh pretrain.py --out /shared/a                # the paper's main model
#     sbatch --nodes=2 slurm.sh pretrain.py --out /shared/a      # on two machines
#     sbatch slurm.sh finetune.py /shared/a/epoch_0300.pt --out /shared/b
#     sbatch slurm.sh knn.py /shared/a/epoch_*.pt
#
# Submit this script from the repository, with the Python environment active. Ten minutes before
# time is up, Slurm sends SIGUSR1 to all tasks: a stage that trains saves last.pt and stops, and the
# job requeues itself. The signal kills knn.py, which has nothing to resume.

# Add what your cluster needs, such as --partition and --account; RUNNING.md says more. Each GPU
# gets one task: on machines with eight GPUs, set both --ntasks-per-node and --gpus-per-node to 8.
# Tasks times --cpus-per-task must not exceed a machine's cores. Many sites need --mem, too.
#SBATCH --time=24:00:00
#SBATCH --nodes=1 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=12
#SBATCH --signal=USR1@600 --requeue --open-mode=append --output=explore-%j.log
# module load python
# export IMAGENET=/path/to/imagenet
# export HF_HUB_OFFLINE=1 HF_HOME=/path/to/cache      # no network: see RUNNING.md

set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}                       # the first machine
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))      # two jobs on one machine need two ports
WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR MASTER_PORT WORLD_SIZE

# srun starts a task for each GPU, and an error in one of them ends all.
printed=$(mktemp)
trap 'rm -f "$printed"' EXIT
code=0
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python "$@"' task "$@" \
    | tee "$printed" || code=$?

# A run that is complete, or whose --max-steps are done, does not print this.
if grep -q 'stopped by \(SIGUSR1\|a signal\)' "$printed"; then
    scontrol requeue "$SLURM_JOB_ID"
else
    exit $code
fi
