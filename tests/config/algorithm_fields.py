"""Fields of advantages, losses and corrections, with the tests that show that they act."""

LOSSES = "algorithms/test_losses.py::test_loss_and_gradient_match_the_papers"
PAIRS = "algorithms/test_sequence_losses.py::test_loss_and_gradient_of_pairs_are_the_papers"
ADVANTAGES = "algorithms/test_advantages.py::test_advantages_match_the_papers"
TURNS = "algorithms/test_turns.py::"
MEANS = "algorithms/test_sequence_losses.py::test_a_score_is_the_sum_or_mean_of_the_trained_tokens"
CLIPS = "algorithms/test_losses.py::test_the_clip_stops_only_moves_away_from_the_old_policy"
REDUCTIONS = "algorithms/test_reductions.py::test_reductions_match_the_papers"
CORRECTIONS = "algorithms/test_corrections.py::test_weights_follow_from_the_ratios"
AUXILIARY = "trainers/test_auxiliary_models.py::"

ALGORITHM_ACTS: dict[str, dict[str, str]] = {
    "PolicyGradientConfig": {
        "trainers/test_policy_gradient.py::"
        "test_the_ratio_uses_the_trainers_logprobs_if_configured": "old_logprobs",
        f"{AUXILIARY}test_a_penalty_in_the_reward_lowers_the_advantage": (
            "reward_kl_coef reward_kl_estimator"
        ),
        "trainers/test_policy_gradient.py::test_long_completions_lose_reward": "overlong_buffer",
        f"{TURNS}test_the_reward_of_a_turn_is_credited_if_the_config_says_so": "credit",
        "trainers/test_policy_gradient.py::"
        "test_each_epoch_visits_every_rollout_once_in_its_own_order": (
            "update_epochs prompts_per_minibatch"
        ),
    },
    "GroupAdvantage.Config": {ADVANTAGES: "normalize_std"},
    "ReinforcePlusPlus.Config": {
        ADVANTAGES: "gamma baseline",
        f"{TURNS}test_reinforce_discounts_per_token_or_per_turn": "discount_per",
    },
    "GAE.Config": {
        ADVANTAGES: "gamma lam whiten",
        f"{TURNS}test_gae_over_turns_is_the_formula": "discount_per",
    },
    "PolicyLoss.Config": {REDUCTIONS: "reduction"},
    "ClippedLoss.Config": {CLIPS: "clip_low clip_high"},
    "DecoupledLoss.Config": {
        "algorithms/test_losses.py::test_the_behaviour_weight_and_its_cap_are_measured": (
            "behaviour_cap"
        )
    },
    "CISPOLoss.Config": {REDUCTIONS: "reduction"},
    "CrossEntropyLoss.Config": {REDUCTIONS: "reduction"},
    "DistillationLoss.Config": {REDUCTIONS: "reduction"},
    "TruncatedIS.Config": {CORRECTIONS: "cap level"},
    "MaskedIS.Config": {CORRECTIONS: "low high level weigh"},
    "StalenessDecay.Config": {
        "trainers/test_policy_gradient.py::"
        "test_corrections_weigh_tokens_by_the_ratio_of_trainer_and_generator": "decay"
    },
    "AdaptiveKL.Config": {
        f"{AUXILIARY}test_an_adaptive_penalty_follows_its_target_across_a_restart": "target",
        "algorithms/test_kl.py::test_rate_and_clip_bound_a_step_of_the_coefficient": "rate clip",
    },
    "ReferenceConfig": {
        f"{AUXILIARY}test_a_reference_is_refreshed_at_its_interval_and_restored": "refresh_every"
    },
    "ValueLoss.Config": {
        "algorithms/test_losses.py::test_value_loss_and_gradient_match_the_formula": "clip"
    },
    "SequenceLoss.Config": {MEANS: "length_normalized"},
    "DPOLoss.Config": {PAIRS: "beta label_smoothing"},
    "IPOLoss.Config": {PAIRS: "tau", MEANS: "length_normalized"},
    "SimPOLoss.Config": {PAIRS: "beta gamma", MEANS: "length_normalized"},
    "BradleyTerryLoss.Config": {PAIRS: "margin centering_coef"},
    "KTOLoss.Config": {
        "algorithms/test_sequence_losses.py::test_loss_and_gradient_of_kto_are_the_papers": (
            "beta desirable_weight undesirable_weight"
        )
    },
}
