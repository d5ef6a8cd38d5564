def make_rows(count: int) -> list[dict]:
    """Metrics of a run whose reward climbs from 0 to 1."""
    return [
        {
            "step": step,
            "reward/mean": (step - 1) / max(count - 1, 1),
            "reward/correct": 0.5,
            "entropy/mean": 1.0 / step,
            "trainer/grad_norm": 0.3,
            "tokens_per_s": 1234.0,
            "timing/generate": 1.0,
            "timing/train": 0.6,
            "timing/push": 0.004,
            "timing/step": 2.0,
        }
        for step in range(1, count + 1)
    ]
