-- Take a run's lease if it is free.
-- KEYS: 1 state (hash), 2 lease (string, expires), 3 counts (hash). ARGV: 1 time to live in ms, 2 host, 3 folder,
--       4 force (1|0), 5 token of a local checkpoint, or 0: the new token is larger; then the fields of counts, which
--       earlier versions of ddrl kept in the state.
-- Answer: the fencing token, or 0 if the lease is held or the run is gone. The token is the number of times the run
-- was taken, times 65536, plus microseconds: a server restored to an older state does not give the same token again.
if redis.call('HEXISTS', KEYS[1], 'status') == 0 then return 0 end
if ARGV[4] ~= '1' and redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('HDEL', KEYS[1], 'handover')  -- first, so that the script works at maxmemory
for i = 6, #ARGV do
  local value = redis.call('HGET', KEYS[1], ARGV[i])
  if value then
    redis.call('HSETNX', KEYS[3], ARGV[i], value)
    redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
local last = math.max(tonumber(redis.call('HGET', KEYS[1], 'fence') or 0), tonumber(ARGV[5]))
local turn = math.floor(last / 65536) + 1
local token = turn * 65536 + redis.call('TIME')[2] % 65536
local text = string.format('%.0f', token)
redis.call('HSET', KEYS[1], 'fence', text, 'host', ARGV[2], 'folder', ARGV[3])
redis.call('SET', KEYS[2], text, 'PX', ARGV[1])
return token
