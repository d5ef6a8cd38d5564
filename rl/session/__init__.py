"""Verbs over models, generators and the push; processes, devices, routing and restarts."""
