-- fenced
-- Change a run's status if the present one allows it. A run that ends stays open until complete.lua.
-- KEYS: 1 state (hash), 2 journal (stream), 3 open runs (zset), 4 counts (hash).
-- ARGV: 1 token (0: the operator), 2 status, 3 reason, 4 ended (1|0), 5 run, 6 cap of the journal,
--       then the statuses that may be replaced.
-- Answer: 1, or 0 if the present status may not be replaced. A repeated call changes nothing and answers 1.
local now = redis.call('HGET', KEYS[1], 'status')
if now == ARGV[2] and redis.call('HGET', KEYS[1], 'reason') == ARGV[3] then return 1 end
for i = 7, #ARGV do
  if now == ARGV[i] then
    local time, idle_since = redis.call('TIME'), redis.call('HGET', KEYS[1], 'idle_since_ms')
    local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
    redis.call('HDEL', KEYS[1], 'ended_ms')  -- first, so that the script works at maxmemory
    redis.call('HSET', KEYS[1], 'status', ARGV[2], 'reason', ARGV[3])
    if ARGV[4] == '1' then redis.call('HSET', KEYS[1], 'ended_ms', now_ms) end
    if ARGV[2] == 'active' then
      redis.call('HSET', KEYS[4], 'crashes', 0, 'error', '')
      redis.call('HDEL', KEYS[1], 'idle_since_ms', 'went_back')
      if idle_since then redis.call('HINCRBY', KEYS[1], 'idle_ms', now_ms - idle_since) end
    elseif not idle_since and redis.call('HEXISTS', KEYS[4], 'first_step_ms') == 1 then
      redis.call('HSET', KEYS[1], 'idle_since_ms', now_ms)
    end
    redis.call('ZADD', KEYS[3], redis.call('HGET', KEYS[1], 'created_ms') or 0, ARGV[5])
    add_capped(KEYS[2], ARGV[6], 'event', ARGV[2], 'reason', ARGV[3])
    return 1
  end
end
return 0
