-- fenced
-- Close an evaluation without a result.
-- KEYS: 1 state (hash), 2 evaluating (hash). ARGV: 1 token, 2 id. Answer: how many of its fields there were.
local id = ARGV[2]
return redis.call('HDEL', KEYS[2], id, id .. ':player', id .. ':beats', id .. ':error')
