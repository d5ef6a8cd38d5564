#!/bin/bash
#SBATCH --job-name=quickstart
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=1500G
#SBATCH --time=1-00:00:00
#SBATCH --partition=gpu
#SBATCH --account=research
#SBATCH --qos=high
#SBATCH --constraint='nvlink&ib'
#SBATCH --nodelist='n[1-9]'
#SBATCH --exclude=n7
#SBATCH --output=/runs/first/logs/slurm-%j.log
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --reservation=mine
#SBATCH --comment='two words'

reason=  # why the run has to leave: USR1 from Slurm before the time limit, or TERM
trap 'reason="the time limit is near"' USR1
trap 'reason="told to end"' TERM
run=/runs/first
node=TILLER/rl/launch/node.py
python=python
max_restarts=3
train=(python -m rl.train --config /runs/first/launch/config.json --output-dir /runs/first)
container=(--container-image=/images/tiller.sqsh --container-mounts=/runs:/runs,/data:/data)
export NCCL_SOCKET_IFNAME=ib0
export QUOTED='it'"'"'s $HOME'
module load cuda/12.8
ulimit -l unlimited

