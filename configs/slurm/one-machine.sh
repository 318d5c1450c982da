#!/bin/bash
# One machine with several GPUs: nmt-train starts its ranks itself, so Slurm needs no PMIx.
#   sbatch configs/slurm/one-machine.sh --config X.yml --mode auto
# To use other devices than all GPUs of a machine: sbatch --export=ALL,DEVICES='cuda x 2' ...
#SBATCH --job-name=nmt-train
#SBATCH --nodes=1
#SBATCH --ntasks=1                 # nmt-train; its ranks are not Slurm's tasks
#SBATCH --gpus=4
#SBATCH --cpus-per-task=32         # for all ranks together
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120          # all ranks save and end two minutes before the time limit; increase for large models
#SBATCH --requeue                  # a job that loses its machine is requeued
#SBATCH --output=nmt-train-%j.log
#SBATCH --open-mode=append         # a requeued job appends to its log

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # since Slurm 22.05, srun does not inherit it

# With srun, Slurm signals nmt-train; without it, scancel would end this script and all its processes at once.
srun nmt-train --devices "${DEVICES:-all}" "$@"
status=$?
case $status in
    0 | 2 | 130 | 143) ;;  # success, user error, SIGINT or SIGTERM
    # 138 = 128 + SIGUSR1: time limit. Other statuses: a rank or a machine was lost. The requeued job resumes the run.
    *) if [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit "$status"
