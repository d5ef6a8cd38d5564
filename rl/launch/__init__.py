"""Where a run is started: on this host, on a cluster of Slurm or Kubernetes."""
