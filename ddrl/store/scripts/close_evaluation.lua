-- fenced
-- Close an evaluation: it has a result, or is given up.
-- KEYS: 1 state (hash), 2 evaluating (hash), 3 players (hash). ARGV: 1 token, 2 id. Answer: 1; 0 if it was not open.
local id = ARGV[2]
redis.call('HDEL', KEYS[3], id .. ':player', id .. ':beats', id .. ':error', id .. ':done')
return redis.call('HDEL', KEYS[2], id)
