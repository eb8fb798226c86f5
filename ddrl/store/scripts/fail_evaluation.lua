-- A worker could not play an open evaluation: store the reason and let another worker take it.
-- KEYS: 1 evaluating (hash: `id`, `id:player`, `id:beats`, `id:error`). ARGV: 1 id, 2 reason.
-- The caller is not checked. Answer: 1; 0 if the evaluation is not open.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1] .. ':player')
redis.call('HSET', KEYS[1], ARGV[1] .. ':error', ARGV[2])
return 1
