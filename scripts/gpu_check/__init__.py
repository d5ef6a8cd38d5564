"""Checks of Tiller on the GPUs of this host."""
