-- Ask processes of a run to end their segments at their next append, for another run.
-- KEYS: 1 state (hash), 2 counts (hash). ARGV: 1 number of processes (replaces an earlier claim), 2 ms for which the claim stands.
-- Answer: 1, or 0 if the run is not active.
if redis.call('HGET', KEYS[1], 'status') ~= 'active' then return 0 end
local time = redis.call('TIME')
redis.call('HSET', KEYS[2], 'claim', ARGV[1], 'claim_until_ms',
  string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2])))
return 1
