#!/bin/bash
# CPU cluster: one rank per machine. Arguments after the script name are passed to nmt-train:
#   sbatch configs/slurm/cpu.sh --config X.yml --mode auto
#SBATCH --job-name=nmt-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16         # cores per machine; its rank uses all of them
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120          # all ranks save and end two minutes before the time limit; increase for large models
#SBATCH --requeue                  # a job that loses a machine is requeued
#SBATCH --output=nmt-train-%j.log
#SBATCH --open-mode=append         # a requeued job appends to its log

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # since Slurm 22.05, srun does not inherit it
# export OMPI_MCA_btl_tcp_if_include=10.0.0.0/24  # the network to use if machines have several

# Without pmix, each task would start its own MPI world. srun --mpi=list shows whether it is available.
srun --mpi=pmix nmt-train "$@"
status=$?
case $status in
    0 | 2 | 130 | 143) ;;  # success, user error, SIGINT or SIGTERM
    # 138 = 128 + SIGUSR1: time limit. Other statuses: a rank or a machine was lost. The requeued job resumes the run.
    *) if [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit "$status"
