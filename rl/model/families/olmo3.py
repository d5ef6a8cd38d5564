"""OLMo 3 of Ai2, an OLMo 2 with attention windows, and scaled rope in the layers without one."""

from dataclasses import replace

from rl.model.families import olmo2

FAMILY = replace(olmo2.FAMILY, model_type="olmo3", prefix="Olmo3", has_windows=True, two_ropes=True)
