"""The policy of PPO."""

from ddrl.algorithms.actor_critic.policy import Policy as Policy
