-- Store the result of an open evaluation, once.
-- KEYS: 1 evaluating (hash), 2 players (hash), 3 evaluations (stream). ARGV: 1 id, 2 result (JSON), 3 seconds until
-- results expire (0: never). Answer: 1; 0 if the evaluation is not open or has a result, or the stream has no ids left.
local id = ARGV[1]
if redis.call('HEXISTS', KEYS[1], id) == 0 or redis.call('HEXISTS', KEYS[2], id .. ':done') == 1 then return 0 end
redis.call('HDEL', KEYS[2], id .. ':error')  -- first: works at maxmemory
if not add_capped(KEYS[3], 10000, 'result', ARGV[2]) then return 0 end
redis.call('HSET', KEYS[2], id .. ':done', 1)
if ARGV[3] ~= '0' then redis.call('EXPIRE', KEYS[3], ARGV[3]) end
return 1
