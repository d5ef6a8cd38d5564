"""Launch of a run: on this host, or on a Slurm or Kubernetes cluster."""
