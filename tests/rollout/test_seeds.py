from itertools import product

from rl.rollout.seeds import derive_seed


def test_every_turn_of_every_sample_has_a_unique_seed():
    streams = ["train", "eval/greedy", "eval/sampled"]
    places = list(product(streams, range(3), range(12), range(12), range(3)))
    seeds = {
        derive_seed(run, prompt_id, sample, turn, stream=stream)
        for stream, run, prompt_id, sample, turn in places
    }
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_never_change():
    """Runs are a function of their seeds: with new values no old run would be repeatable."""
    assert derive_seed(0, 0, 0) == 809641258927754436
    assert derive_seed(1, 23, 4, 5, stream="eval/greedy") == 5802365615274067443
