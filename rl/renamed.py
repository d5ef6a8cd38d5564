"""Config fields that were renamed. An old name is refused with the new name.

Only names are listed here. Values that a field no longer takes are refused by its type.
"""

import re

RENAMED = {
    "data": "task",
    "rollout.parts_per_step": "rollout.stream_chunks",
    "rollout.max_replacements": "rollout.max_resampled_groups",
    "rollout.recorded_per_step": "record.sample",
    "algorithm.proximal": "algorithm.old_logprobs",
    "algorithm.mini_batch": "algorithm.prompts_per_minibatch",
    "generator.swap": "generator.inflight_policy",
    "watchdog.flat": "watchdog.zero_std",
    "watchdog.flat_steps": "watchdog.zero_std_steps",
}
"""New name by old name, both as paths from the RLConfig."""


def new_name(old: str) -> str:
    """Return the new path of field ``old``; '' if neither the field nor its section was renamed."""
    for name, new in RENAMED.items():
        if old == name or old.startswith(f"{name}."):
            return new + old.removeprefix(name)
    return ""


def hint(message: str) -> str:
    """Return a clause for Python's ``message`` about an attribute or argument that was renamed."""
    if not re.search(r"has no attribute|unexpected keyword argument", message):
        return ""
    news = [new for old, new in RENAMED.items() if message.endswith(f"'{old.split('.')[-1]}'")]
    return f"; it is now called {news[0]}" if news else ""
