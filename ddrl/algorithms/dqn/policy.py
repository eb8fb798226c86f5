"""The policy of DQN."""

from ddrl.algorithms.value_learning.policy import Policy as Policy
