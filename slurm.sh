#!/bin/bash
# Pretraining on a Slurm cluster, here on two machines with four GPUs each:
#
#     sbatch slurm.sh --epochs 100 --out /shared/a
#
# All arguments go to pretrain.py. Submit it in the repository, with Python's environment active.
# RUNNING.md says what to adapt. Two minutes before the time is up, Slurm sends SIGUSR1 to all
# tasks: the run saves last.pt and stops, and this job puts itself back into the queue.
#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=12 --time=24:00:00
#SBATCH --signal=USR1@120 --requeue --open-mode=append --output=explore-%j.log
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}                       # the first one
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))      # two jobs on one machine need two ports
WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR MASTER_PORT WORLD_SIZE

# srun starts a task for each GPU. An error in one of them ends all, and ends this script here.
printed=$(mktemp)
trap 'rm -f "$printed"' EXIT
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python pretrain.py "$@"' task "$@" \
    | tee "$printed"

# A run that is complete, or whose --max-steps are done, does not print this line.
if grep -q '^SIGUSR1: ' "$printed"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
