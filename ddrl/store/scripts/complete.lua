-- fenced
-- Note that the results of an ended run are complete. Do nothing if it goes on again.
-- KEYS: 1 state (hash), 2 open runs (zset). ARGV: 1 token, 2 run, 3 its bytes, then the statuses of ended runs.
-- Answer: none.
local status = redis.call('HGET', KEYS[1], 'status')
for i = 4, #ARGV do
  if status == ARGV[i] then
    redis.call('ZREM', KEYS[2], ARGV[2])
    redis.call('HSET', KEYS[1], 'bytes', ARGV[3])
  end
end
