"""What Slurm is asked for, as numbers."""

import pytest

from rl.cluster import SlurmConfig


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
def test_a_time_limit_means_what_it_means_to_slurm(time, seconds):
    assert SlurmConfig(time=time).time_s == seconds


@pytest.mark.parametrize("time", ["1h", "1:2:3:4", "1-", "-5", "12:", "infinite"])
def test_what_is_no_time_of_slurms_is_none_here(time):
    with pytest.raises(ValueError):
        _ = SlurmConfig(time=time).time_s
