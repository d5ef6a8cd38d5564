"""Comparison of generator and trainer, or of two layouts, module by module."""
