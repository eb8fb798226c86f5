-- fenced
-- Close an evaluation without a result.
-- KEYS: 1 state (hash), 2 evaluating (hash). ARGV: 1 token, 2 evaluation id. Answer: 1 if it was open.
return redis.call('HDEL', KEYS[2], ARGV[2])
