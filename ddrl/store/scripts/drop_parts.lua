-- fenced
-- Remove parts of checkpoints. KEYS: 1 state (hash), then at most 1000 parts. ARGV: 1 token. Answer: number removed.
return redis.call('UNLINK', unpack(KEYS, 2))
