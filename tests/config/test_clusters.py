"""Resources that a config asks Slurm for."""

import pytest

from rl.config.clusters import SlurmConfig


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("", None),
        ("90", 5400),
        ("90:30", 5430),
        ("2:03:04", 7384),
        ("1-2", 93600),
        ("1-2:03", 93780),
        ("1-2:03:04", 93784),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(time, seconds):
    assert SlurmConfig(time=time).time_s == seconds


@pytest.mark.parametrize("time", ["1h", "1:2:3:4", "1-", "-5", "12:", "infinite"])
def test_an_invalid_time_limit_is_refused(time):
    with pytest.raises(ValueError):
        _ = SlurmConfig(time=time).time_s
