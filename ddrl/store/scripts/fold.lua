-- fenced
-- Fold producers whose processes have ended into one field of `producers` and one of `ledger`, unless one has changed.
-- From then on no append is accepted from a producer up to `folded` that is not in `producers`.
-- KEYS: 1 state (hash), 2 producers (hash), 3 ledger (hash), 4 counter of producers.
-- ARGV: 1 token, 2 field of the folded, 3 and 4 its new values, then field and both values, as read ("": none), of each
--       to fold. Ids that the counter did not give do not raise `folded`.
-- Answer: 1, or 0 if one of them has changed since it was read.
redis.call('HDEL', KEYS[3], '')  -- first, so that the script works at maxmemory
local last = tonumber(redis.call('HGET', KEYS[1], 'folded') or 0)
local newest = number(redis.call('GET', KEYS[4])) or 0
for i = 5, #ARGV, 3 do
  local producer, row = redis.call('HGET', KEYS[2], ARGV[i]), redis.call('HGET', KEYS[3], ARGV[i])
  if (producer or '') ~= ARGV[i + 1] or (row or '') ~= ARGV[i + 2] then return 0 end
  local id = number(ARGV[i])
  if id and id <= newest then last = math.max(last, id) end
end
for i = 5, #ARGV, 3 do
  redis.call('HDEL', KEYS[2], ARGV[i])
  redis.call('HDEL', KEYS[3], ARGV[i])
end
redis.call('HSET', KEYS[1], 'folded', string.format('%.0f', last))
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
redis.call('HSET', KEYS[3], ARGV[2], ARGV[4])
return 1
