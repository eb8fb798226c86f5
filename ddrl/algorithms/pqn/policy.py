"""The policy of PQN."""

from ddrl.algorithms.value_learning.policy import Policy as Policy
