-- Close an evaluation and store its result, once.
-- KEYS: 1 evaluating (hash), 2 evaluations (stream). ARGV: 1 id, 2 result (JSON), 3 seconds until results expire
-- (0: never). Answer: 1; 0 if the evaluation is not open, or the stream has no ids left.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1] .. ':error')  -- first: works at maxmemory
if not add_capped(KEYS[2], 10000, 'result', ARGV[2]) then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1], ARGV[1] .. ':player', ARGV[1] .. ':beats')
if ARGV[3] ~= '0' then redis.call('EXPIRE', KEYS[2], ARGV[3]) end
return 1
