"""Deep Q-networks (DQN) with the options of Rainbow and Ape-X."""
