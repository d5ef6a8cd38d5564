"""Thin Monarch shells around the engines, and the supervision of every call to them."""
