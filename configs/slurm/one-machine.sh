#!/bin/bash
# One machine with several GPUs, also where Slurm has no PMIx: nmt-train starts its ranks by itself.
#   sbatch configs/slurm/one-machine.sh --config X.yml --mode sparse-overlap
# Other devices than all of a machine's GPUs: sbatch --export=ALL,DEVICES='cuda x 2' ...
#SBATCH --job-name=nmt-train
#SBATCH --nodes=1
#SBATCH --ntasks=1                 # nmt-train; its ranks are not Slurm's tasks
#SBATCH --gpus=4
#SBATCH --cpus-per-task=32         # of all ranks together
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120          # two minutes before the time is up all ranks save and end; larger models: longer
#SBATCH --requeue                  # a job that loses its machine is queued again
#SBATCH --output=nmt-train-%j.log
#SBATCH --open-mode=append         # a job that is queued again keeps its log

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # since Slurm 22.05 srun has to be told again

# srun, because what Slurm signals is its task; without it scancel would end this script, and all that runs, at once.
srun nmt-train --devices "${DEVICES:-all}" "$@"
status=$?
case $status in
    0 | 2 | 130 | 143) ;;  # done, a mistake in what was asked for, or a wish for an end
    # 138 = 128 + SIGUSR1: the time was up. Any other: a rank or a machine was lost. Queued again, the run continues.
    *) if [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit "$status"
