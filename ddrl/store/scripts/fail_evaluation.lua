-- A worker does not play an open evaluation to its end: store the reason, if any, and let another worker take it.
-- KEYS: 1 evaluating (hash), 2 players (hash). ARGV: 1 id, 2 reason.
-- The caller is not checked. Answer: 1; 0 if the evaluation is not open.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1] .. ':player')
redis.call('HSET', KEYS[2], ARGV[1] .. ':error', ARGV[2])
return 1
