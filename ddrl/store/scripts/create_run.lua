-- Store a new run. A second call changes nothing: the first reply may have been lost and the run begun since.
-- KEYS: 1 spec (string), 2 state (hash), 3 journal (stream), 4 initial weights (string), 5 all runs (zset),
--       6 runs that have not ended (zset), then parts of its checkpoint.
-- ARGV: 1 run, 2 spec (JSON), 3 initial weights or "", 4 creation time in ms, then fields of the state and values.
-- Answer: 1; 0 if the run is there; -1 if a part is not, and nothing is stored.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for i = 7, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return -1 end
end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] ~= '' then redis.call('SET', KEYS[4], ARGV[3]) end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
redis.call('ZADD', KEYS[5], ARGV[4], ARGV[1])
redis.call('ZADD', KEYS[6], ARGV[4], ARGV[1])
add(KEYS[3], '*', 'event', 'created')
return 1
