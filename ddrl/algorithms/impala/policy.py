"""The policy of IMPALA."""

from ddrl.algorithms.actor_critic.policy import Policy as Policy
