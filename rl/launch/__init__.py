"""Start of a run: on this host, on a cluster of Slurm or Kubernetes."""
