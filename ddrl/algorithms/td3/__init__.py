"""Twin delayed deep deterministic policy gradient (TD3)."""
