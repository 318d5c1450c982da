#!/bin/bash
# GPU cluster: one rank per GPU. What follows the script's name goes to nmt-train:
#   sbatch configs/slurm/gpu.sh --config X.yml --mode sparse-overlap
# Other devices than all of a machine's GPUs: sbatch --export=ALL,DEVICES='cuda x 2' ...
#SBATCH --job-name=nmt-train
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4          # not --gpus-per-task: each rank sees all GPUs of its machine, and takes its own
#SBATCH --ntasks-per-node=4        # as many as GPUs
#SBATCH --cpus-per-task=8          # for reading data and for what CPUs compute of an exchange
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120          # two minutes before the time is up all ranks save and end; larger models: longer
#SBATCH --requeue                  # a job that loses a machine is queued again
#SBATCH --output=nmt-train-%j.log
#SBATCH --open-mode=append         # a job that is queued again keeps its log

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # since Slurm 22.05 srun has to be told again
# export OMPI_MCA_btl_tcp_if_include=10.0.0.0/24  # which network, where machines have several

# pmix: without it every rank would believe itself alone. Is it there? srun --mpi=list
srun --mpi=pmix nmt-train --devices "${DEVICES:-all}" "$@"
status=$?
case $status in
    0 | 2 | 130 | 143) ;;  # done, a mistake in what was asked for, or a wish for an end
    # 138 = 128 + SIGUSR1: the time was up. Any other: a rank or a machine was lost. Queued again, the run continues.
    *) if [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit "$status"
