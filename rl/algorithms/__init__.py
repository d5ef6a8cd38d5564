"""RL algorithms: their protocol, policy gradients, advantages, losses, KL and off-policy
corrections.
"""
