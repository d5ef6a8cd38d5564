import rl  # noqa: F401 -- selects the device; must precede the torchtitan imports of this package
