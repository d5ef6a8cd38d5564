"""Protocols of tasks and environments, tools, agents, and adapters of other packages."""
