"""Tinker's protocol: training and sampling for clients of its SDK."""
